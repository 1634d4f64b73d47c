"""An offset allocator for one piece of memory. Imports no torch and holds no memory. Not thread-safe."""

from __future__ import annotations

from bisect import bisect_left, insort

from kvstore.errors import StoreError

ALIGNMENT = 512
"""Every block starts at a multiple of this many bytes: what a GPU copies at full speed, and any dtype's own."""


class Arena:
    """Blocks within `nbytes` bytes: best fit, and neighbouring free blocks become one.

    `allocate` and `free` search in O(log blocks). Sizes are rounded up to `ALIGNMENT`.

    Args:
        nbytes: size of the memory, rounded up to a multiple of `ALIGNMENT`.

    Attributes:
        nbytes: bytes that blocks can have in all, which the memory must have.
        bytes_used: bytes of all blocks in use, rounded up.

    Raises:
        StoreError: a negative size.
    """

    def __init__(self, nbytes: int):
        if nbytes < 0:
            raise StoreError(f"An arena of {nbytes} bytes makes no sense; give 0 or more.")
        self.nbytes = _rounded(nbytes)
        self.bytes_used = 0
        self._used: dict[int, int] = {}
        # The free blocks by both ends, to join neighbours, and by size, to find the best fit.
        self._free_by_start: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._free_by_size: list[tuple[int, int]] = []
        if self.nbytes:
            self._add_free(0, self.nbytes)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block; far below the free bytes in all, the arena is fragmented."""
        return self._free_by_size[-1][0] if self._free_by_size else 0

    def can_fit(self, nbytes: int) -> bool:
        """Whether `allocate` would find a block."""
        return _rounded(nbytes) <= self.largest_free

    def allocate(self, nbytes: int) -> int | None:
        """Take the smallest free block that holds `nbytes`; its offset, None if there is no such block.

        Raises:
            StoreError: fewer than one byte.
        """
        if nbytes < 1:
            raise StoreError(f"A block of {nbytes} bytes makes no sense; give at least 1.")
        size = _rounded(nbytes)
        index = bisect_left(self._free_by_size, (size, 0))
        if index == len(self._free_by_size):
            return None
        found, offset = self._free_by_size[index]
        self._drop_free(offset, found)
        if found > size:
            self._add_free(offset + size, found - size)
        self._used[offset] = size
        self.bytes_used += size
        return offset

    def free(self, offset: int) -> int:
        """Give the block at `offset` back: its bytes, rounded up as they were.

        Raises:
            StoreError: no block in use starts there; a block is freed once.
        """
        size = self._used.pop(offset, None)
        if size is None:
            raise StoreError(f"No block in use starts at byte {offset} of the arena; a block is freed once.")
        self.bytes_used -= size
        start, end = offset, offset + size
        if start in self._start_by_end:
            before = self._start_by_end[start]
            self._drop_free(before, start - before)
            start = before
        if end in self._free_by_start:
            after = self._free_by_start[end]
            self._drop_free(end, after)
            end += after
        self._add_free(start, end - start)
        return size

    def _add_free(self, start: int, size: int) -> None:
        self._free_by_start[start] = size
        self._start_by_end[start + size] = start
        insort(self._free_by_size, (size, start))

    def _drop_free(self, start: int, size: int) -> None:
        del self._free_by_start[start]
        del self._start_by_end[start + size]
        del self._free_by_size[bisect_left(self._free_by_size, (size, start))]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
