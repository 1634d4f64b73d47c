"""Bringing the bytes of one chunk to memory in slices: while one is hashed, the next is being read.

Reading and hashing release the interpreter's lock. The slices of a file are read in order and one at a time: the
kernel then sees one stream and reads ahead, which two threads in one file, and advice (posix_fadvise) of any kind,
were measured to disturb. What keeps a fast disk busy is several chunks at once, as the prefetcher reads them.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_128_digest

THREADS = 2
"""Threads that one buffer's slices are shared among, the caller's own included."""


class ByteSource(Protocol):
    """Bytes that can be copied from any offset, by any number of threads at once."""

    nbytes: int

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Copy bytes from `offset` on into the buffer, as many as come at once: their count, 0 at the end.

        Raises:
            OSError: they cannot be read.
        """
        ...

    def close(self) -> None:
        """Let the source go."""
        ...


class FileSource:
    """A file, read with plain reads and never mapped.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path):
        self._file = io.FileIO(path)
        self.nbytes = self._file.seek(0, io.SEEK_END)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See ByteSource."""
        return os.preadv(self._file.fileno(), [buffer], offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MemorySource:
    """Bytes that are in memory already, as a remote tier brings them."""

    def __init__(self, data: bytes | bytearray | memoryview):
        self._data = memoryview(data).cast("B")
        self.nbytes = self._data.nbytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See ByteSource."""
        found = self._data[offset : offset + buffer.nbytes]
        buffer[: found.nbytes] = found
        return found.nbytes

    def close(self) -> None:
        """Let the bytes go."""
        self._data.release()


def read_exactly(source: ByteSource, buffer: memoryview, offset: int) -> None:
    """Fill the whole buffer with the bytes from `offset` on.

    Raises:
        EOFError: the source ends before.
        OSError: it cannot be read.
    """
    while buffer:
        count = source.read_into(buffer, offset)
        if not count:
            raise EOFError
        buffer = buffer[count:]
        offset += count


def read_and_digest(source: ByteSource, buffer: memoryview, offset: int, slice_bytes: int) -> list[bytes]:
    """Fill the whole buffer with the bytes from `offset` on: the XXH3-128 of each slice of it, in order.

    When this returns or raises, nothing writes to the buffer any more.

    Args:
        source: what is read.
        buffer: where the bytes go; contiguous.
        offset: of the first byte in the source.
        slice_bytes: size of every slice but the last, which may be shorter.

    Raises:
        EOFError: the source ends before.
        OSError: it cannot be read.
    """

    def fetch(part: memoryview, start: int) -> None:
        read_exactly(source, part, offset + start)

    return _by_slice(buffer, slice_bytes, fetch)


def digests(data: memoryview, slice_bytes: int) -> list[bytes]:
    """The XXH3-128 of each slice, in order; the last slice may be shorter than the others."""
    return _by_slice(data, slice_bytes, lambda part, start: None)


def _by_slice(data: memoryview, slice_bytes: int, fetch: Callable[[memoryview, int], None]) -> list[bytes]:
    starts = range(0, data.nbytes, slice_bytes)
    slices = _Slices([(data[start : start + slice_bytes], start) for start in starts], fetch)
    # Helpers only make it faster: where no thread can be had (at exit, say), the caller does everything.
    with suppress(RuntimeError):
        for _ in range(min(len(starts), THREADS) - 1):
            _helpers().submit(slices.help)
    return slices.finish()


class _Slices:
    """Slices of one buffer, each fetched in its turn and hashed by the thread that fetched it."""

    def __init__(self, slices: list[tuple[memoryview, int]], fetch: Callable[[memoryview, int], None]):
        self._fetch = fetch
        self._results: list[bytes] = [b""] * len(slices)
        self._left = [(index, part, start) for index, (part, start) in enumerate(slices)][::-1]
        self._busy = 0
        self._error: BaseException | None = None
        self._order = threading.Lock()
        self._changed = threading.Condition()

    def help(self) -> None:
        """Fetch and hash slices until none is left. What goes wrong is kept for `finish`."""
        while self._begin():
            try:
                with self._order:
                    taken = self._take()
                    if taken is None:
                        return
                    index, part, start = taken
                    self._fetch(part, start)
                self._results[index] = xxh3_128_digest(part)
            except BaseException as failure:  # also an interrupt: the other threads must be waited for
                self._fail(failure)
            finally:
                self._give_back()

    def finish(self) -> list[bytes]:
        """Work, wait for those who help, and return the results in order, or raise what went wrong first."""
        self.help()
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
        error, self._error = self._error, None
        if error is None:
            return self._results
        try:
            raise error
        finally:
            # The error's frames hold the buffer: a cycle through them would keep it until a collection.
            del error

    def _begin(self) -> bool:
        with self._changed:
            self._busy += bool(self._left)
            return bool(self._left)

    def _take(self) -> tuple[int, memoryview, int] | None:
        with self._changed:
            return self._left.pop() if self._left else None

    def _give_back(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._left.clear()
            if self._error is None:
                self._error = error


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """One pool for all readers of the process: who reads many chunks at once has threads of its own."""
    return ThreadPoolExecutor(max(1, THREADS - 1), thread_name_prefix="chunk-slices")


# Threads do not survive a fork; the child starts its own.
os.register_at_fork(after_in_child=_helpers.cache_clear)
