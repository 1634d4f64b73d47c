from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvstore import parallel_read
from kvstore.parallel_read import FileSource, MemorySource, digests, read_and_digest, read_exactly

SLICE = 64


@pytest.fixture(params=[1, 4], ids=["one_thread", "four_threads"], autouse=True)
def threads(request, monkeypatch) -> None:
    monkeypatch.setattr(parallel_read, "THREADS", request.param)


def sizes_around_borders() -> st.SearchStrategy[int]:
    return st.builds(lambda slices, off: max(0, slices * SLICE + off), st.integers(0, 12), st.integers(-2, 2))


def digests_of(data: bytes) -> list[bytes]:
    return [xxh3_128_digest(data[start : start + SLICE]) for start in range(0, len(data), SLICE)]


@given(size=sizes_around_borders(), offset=st.integers(0, 100), seed=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_slices_by_many_threads_give_what_one_plain_read_gives(tmp_path_factory, size, offset, seed):
    content = bytes((seed + index * 7) % 256 for index in range(offset + size + 3))
    path = tmp_path_factory.mktemp("file") / "a"
    path.write_bytes(content)
    expected = content[offset : offset + size]
    for source in (FileSource(path), MemorySource(content)):
        found = bytearray(size)
        assert read_and_digest(source, memoryview(found), offset, SLICE) == digests_of(expected)
        assert found == expected
        source.close()
    assert digests(memoryview(expected), SLICE) == digests_of(expected)


class Trickle(MemorySource):
    """Gives a few bytes at a time, as the kernel may."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return super().read_into(buffer[:7], offset)


def test_reads_that_come_in_pieces_are_put_together():
    content = os.urandom(10 * SLICE + 5)
    found = bytearray(len(content))
    assert read_and_digest(Trickle(content), memoryview(found), 0, SLICE) == digests_of(content)
    assert found == content


@pytest.mark.parametrize("missing", [1, SLICE, 5 * SLICE + 3])
def test_a_source_that_ends_before_is_an_end_of_file(missing):
    source = MemorySource(bytes(10 * SLICE - missing))
    with pytest.raises(EOFError):
        read_and_digest(source, memoryview(bytearray(10 * SLICE)), 0, SLICE)
    with pytest.raises(EOFError):
        read_exactly(source, memoryview(bytearray(10 * SLICE)), 0)


class Failing(MemorySource):
    """Fails at one offset and counts who is reading."""

    def __init__(self, data: bytes, at: int):
        super().__init__(data)
        self._at = at
        self.reading = self.reads = 0

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self.reading += 1
        self.reads += 1
        try:
            if offset == self._at:
                raise OSError(5, "Input/output error")
            threading.Event().wait(0.01)
            return super().read_into(buffer, offset)
        finally:
            self.reading -= 1


@pytest.mark.parametrize("at", [0, 4 * SLICE, 9 * SLICE])
def test_after_a_failure_nobody_writes_to_the_buffer_any_more(at):
    source = Failing(b"\xff" * 10 * SLICE, at)
    buffer = bytearray(10 * SLICE)
    with pytest.raises(OSError, match="Input/output"):
        read_and_digest(source, memoryview(buffer), 0, SLICE)
    assert source.reading == 0
    before = bytes(buffer)
    threading.Event().wait(0.05)
    assert buffer == before


def test_after_a_failure_no_more_slices_are_begun(monkeypatch):
    monkeypatch.setattr(parallel_read, "THREADS", 1)
    source = Failing(bytes(10 * SLICE), 2 * SLICE)
    with pytest.raises(OSError, match="Input/output"):
        read_and_digest(source, memoryview(bytearray(10 * SLICE)), 0, SLICE)
    assert source.reads == 3


class Memory(bytearray):
    """Memory whose release can be seen."""


def test_a_failure_does_not_keep_the_buffer_alive():
    gc.disable()
    try:
        buffer = Memory(10 * SLICE)
        gone = weakref.ref(buffer)
        with pytest.raises(OSError, match="Input/output"):
            read_and_digest(Failing(bytes(10 * SLICE), 0), memoryview(buffer), 0, SLICE)
        del buffer
        for _ in range(100):  # helpers let go of it when they next look
            if gone() is None:
                break
            threading.Event().wait(0.01)
        assert gone() is None
    finally:
        gc.enable()


def test_many_readers_at_once_each_get_their_own_bytes(tmp_path):
    contents = [os.urandom(20 * SLICE + seed) for seed in range(16)]
    found: dict[int, tuple[bytes, list[bytes]]] = {}

    def read(seed: int, path: Path) -> None:
        buffer = bytearray(len(contents[seed]))
        source = FileSource(path)
        read_digests = read_and_digest(source, memoryview(buffer), 0, SLICE)
        found[seed] = bytes(buffer), read_digests
        source.close()

    readers = []
    for seed, content in enumerate(contents):
        (tmp_path / str(seed)).write_bytes(content)
        readers.append(threading.Thread(target=read, args=(seed, tmp_path / str(seed))))
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == {seed: (content, digests_of(content)) for seed, content in enumerate(contents)}


def test_without_threads_to_help_the_caller_reads_everything(monkeypatch):
    class NoThreads:
        def submit(self, work: object) -> None:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(parallel_read, "_helpers", NoThreads)
    content = os.urandom(10 * SLICE)
    found = bytearray(len(content))
    assert read_and_digest(MemorySource(content), memoryview(found), 0, SLICE) == digests_of(content)
    assert found == content


def test_a_forked_child_reads_with_threads_of_its_own(run_python):
    code = (
        "import os; from kvstore import parallel_read\n"
        "from kvstore.parallel_read import digests\n"
        "parallel_read.THREADS = 4\n"
        "data = memoryview(os.urandom(100000)); expected = digests(data, 64)\n"
        "child = os.fork()\n"
        "same = digests(data, 64) == expected\n"
        "alive = all(thread.is_alive() for thread in parallel_read._helpers()._threads)\n"
        "if child == 0: os._exit(0 if same and alive else 1)\n"
        "print(same, os.waitpid(child, 0)[1])"
    )
    assert run_python(code).split() == ["True", "0"]
