"""Chunks in an order that changes: a heap in which outdated entries stay until they come up, or are too many."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kvstore.key import ChunkKey

Rank = TypeVar("Rank", int, tuple[float, int])

# Below this many entries, rebuilding the heap is not worth the thought.
_SMALL = 64


class Ranking(Generic[Rank]):
    """Chunks with a rank and a size each, lowest rank first; no two chunks have the same rank.

    O(log n) a call, amortised; `lowest` that for each chunk it returns.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, ChunkKey]] = []
        self._current: dict[ChunkKey, tuple[Rank, int]] = {}
        self.nbytes = 0
        """Bytes of all chunks in the ranking."""

    def set(self, key: ChunkKey, rank: Rank, nbytes: int) -> None:
        """Enter a chunk, or move it to another rank."""
        self.discard(key)
        self._current[key] = rank, nbytes
        self.nbytes += nbytes
        heappush(self._heap, (rank, key))

    def discard(self, key: ChunkKey) -> None:
        """Take a chunk out; nothing happens if it is not there."""
        current = self._current.pop(key, None)
        if current is None:
            return
        self.nbytes -= current[1]
        if len(self._heap) > 2 * len(self._current) + _SMALL:
            self._heap = [(rank, key) for key, (rank, _) in self._current.items()]
            heapify(self._heap)

    def first(self) -> ChunkKey:
        """The chunk of the lowest rank.

        Raises:
            IndexError: the ranking is empty.
        """
        while not self._is_current(*self._heap[0]):
            heappop(self._heap)
        return self._heap[0][1]

    def lowest(self, nbytes: int) -> list[ChunkKey]:
        """The first chunks that have at least `nbytes` together, all if they have not; they stay in the ranking."""
        found: dict[ChunkKey, Rank] = {}
        missing = nbytes
        while missing > 0 and self._heap:
            rank, key = heappop(self._heap)
            # A chunk that was taken out and set again at the same rank has two entries.
            if self._is_current(rank, key) and key not in found:
                found[key] = rank
                missing -= self._current[key][1]
        for key, rank in found.items():
            heappush(self._heap, (rank, key))
        return list(found)

    def _is_current(self, rank: Rank, key: ChunkKey) -> bool:
        current = self._current.get(key)
        return current is not None and current[0] == rank
