"""Files that cannot be looked at or read now, and files that are right for another program: all are left alone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from kvstore_samples import FINGERPRINT, ONE_RANK, identity_of, same, sample

from kvstore import ChunkStore, ChunkUnavailable, DiskTier, Tier, UnavailableReason

PLENTY = 100 * sample(0).nbytes
REFUSALS = pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)

Refusing = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    """Lets the kernel refuse to look at chunk files while in the context (to root it never refuses by itself)."""

    @contextmanager
    def refuse(number: int) -> Iterator[None]:
        real = os.stat

        def stat(path, *args, **kwargs):
            if str(path).endswith(".safetensors"):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat)
            yield

    return refuse


def path_of(root: Path, seed: int) -> Path:
    identity = identity_of(seed)
    return DiskTier(root).path_of(identity.key, identity.fingerprint, ONE_RANK)


@REFUSALS
def test_a_file_that_cannot_be_looked_at_is_unreadable_and_no_raw_error_escapes(tmp_path, refusing, number):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    with refusing(number), pytest.raises(ChunkUnavailable) as caught:
        disk.read(identity_of(1), ONE_RANK)
    assert (caught.value.reason, caught.value.damaged) == (UnavailableReason.UNREADABLE, False)
    assert same(disk.read(identity_of(1), ONE_RANK), sample(1))


@REFUSALS
@pytest.mark.parametrize("way", ["get", "load"])
def test_a_chunk_is_still_offered_after_an_error_that_passes_and_is_then_served(tmp_path, refusing, number, way):
    ChunkStore(tmp_path, 0).put(sample(1))
    store = ChunkStore(tmp_path, PLENTY)
    events: list[object] = []
    store.subscribe(events.append)
    with refusing(number), pytest.raises(ChunkUnavailable) as caught:
        getattr(store, way)(identity_of(1))
    assert caught.value.reason is UnavailableReason.UNREADABLE
    assert store.lookup(identity_of(1)) is Tier.DISK
    assert events == []
    assert store.host_bytes_used == 0
    assert same(store.get(identity_of(1)), sample(1))


@REFUSALS
def test_refreshing_while_files_cannot_be_looked_at_forgets_none(tmp_path, refusing, number):
    ChunkStore(tmp_path, 0).put(sample(1))
    store = ChunkStore(tmp_path, PLENTY)
    with refusing(number):
        store.refresh()
        assert ChunkStore(tmp_path, PLENTY).records() == []
    assert store.lookup(identity_of(1)) is Tier.DISK


@REFUSALS
def test_a_chunk_kept_on_disk_counts_as_kept_when_it_cannot_be_looked_at_afterwards(tmp_path, refusing, number):
    store = ChunkStore(tmp_path, 0)
    with refusing(number):
        assert store.put(sample(1)).on_disk
    assert same(store.get(identity_of(1)), sample(1))


def test_a_file_that_is_gone_is_no_longer_offered(tmp_path):
    ChunkStore(tmp_path, 0).put(sample(1))
    store = ChunkStore(tmp_path, PLENTY)
    path_of(tmp_path, 1).unlink()
    with pytest.raises(ChunkUnavailable):
        store.get(identity_of(1))
    assert store.lookup(identity_of(1)) is None


def test_verify_calls_wrong_content_damaged_but_not_another_version_nor_what_cannot_be_read_now(tmp_path):
    """A folder in a file's place cannot be read by anyone, root included."""
    disk = DiskTier(tmp_path)
    for seed in range(5):
        disk.put(sample(seed))
    flipped, cut, strange, newer = (path_of(tmp_path, seed) for seed in (1, 2, 3, 4))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    cut.write_bytes(cut.read_bytes()[:-1])
    strange.write_bytes(b"malformed" * 9)
    newer.write_bytes(newer.read_bytes().replace(b'"version":"2"', b'"version":"9"'))
    swapped, unreadable = path_of(tmp_path, 8), path_of(tmp_path, 9)
    swapped.write_bytes(path_of(tmp_path, 0).read_bytes())
    unreadable.mkdir()
    leftover = tmp_path / FINGERPRINT[:16] / f".{flipped.name}.999.abcd.tmp"
    leftover.write_bytes(b"half")
    found = {problem.path: (problem.reason.value, problem.damaged, problem.removable) for problem in disk.verify()}
    assert found == {
        flipped: ("checksum", True, False),
        cut: ("truncated", True, False),
        strange: ("unreadable", True, False),
        swapped: ("tokens_differ", True, False),
        newer: ("format_version", False, False),
        unreadable: ("unreadable", False, False),
        leftover: ("truncated", False, True),
    }
