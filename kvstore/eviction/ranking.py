"""Chunks in an order that changes: a heap that hears of a higher rank only when the chunk comes up."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from kvstore.key import ChunkKey

# Rank, what decides among equals, chunk: flat, because the comparisons of a large heap wait for the memory.
_Entry = tuple[float, int, ChunkKey]

# Below this many entries, outdated ones are not worth the thought.
_SMALL = 64
# Entries swept by a change: a sweep ends before a quarter as many changes as there were entries.
_SWEPT = 4


class Ranking:
    """Chunks with a rank and a size each, lowest rank first, and among equals the lowest turn.

    Most changes raise a rank, and most chunks never come up: a chunk whose rank rises keeps its entry in the heap, and
    gets another when that one is the lowest. A lower rank makes the entry outdated, and so may taking the chunk out.
    When more than half of the entries are outdated, each change from then on sweeps a few: they are taken from the end
    of the heap, of which the rest is a heap still, and those that count are entered in a second heap.

    `set` and `discard` cost O(log n) each, never more. `first` and `lowest` cost that for each chunk they return and
    for each change before them, once, of a chunk that comes up: O(log n) a call, amortised.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._swept: list[_Entry] = []
        # The entry that a chunk ought to have, its bytes, and the one that it has, which is never above. One dict,
        # because each look for one of many chunks waits for the memory.
        self._current: dict[ChunkKey, tuple[_Entry, int, _Entry]] = {}
        # The entry of a chunk that was taken out, in case it is set again before that comes up.
        self._left: dict[ChunkKey, _Entry] = {}
        self.nbytes = 0
        """Bytes of all chunks in the ranking."""

    def set(self, key: ChunkKey, nbytes: int, rank: float, turn: int = 0) -> None:
        """Enter a chunk, or move it to another rank; no two have the same rank and turn."""
        due = (rank, turn, key)
        current = self._current.get(key)
        if current is None:
            entry = self._left.pop(key, None)
            self.nbytes += nbytes
        else:
            entry = current[2]
            self.nbytes += nbytes - current[1]
        if entry is not None and entry <= due:
            self._current[key] = due, nbytes, entry
        else:
            self._current[key] = due, nbytes, due
            heappush(self._heap, due)
            self._tidy()

    def discard(self, key: ChunkKey) -> None:
        """Take a chunk out; nothing happens if it is not there."""
        current = self._current.pop(key, None)
        if current is not None:
            self.nbytes -= current[1]
            self._left[key] = current[2]
            self._tidy()

    def first(self) -> ChunkKey:
        """The chunk of the lowest rank.

        Raises:
            IndexError: the ranking is empty.
        """
        return self._lowest_heap()[0][2]

    def lowest(self, nbytes: int) -> list[ChunkKey]:
        """The first chunks that have at least `nbytes` together, all if they have not; they stay in the ranking."""
        found: list[ChunkKey] = []
        aside: list[_Entry] = []
        missing = nbytes
        while missing > 0:
            heap = self._lowest_heap()
            if not heap:
                break
            key = heap[0][2]
            found.append(key)
            missing -= self._current[key][1]
            if missing > 0:
                aside.append(heappop(heap))
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def _lowest_heap(self) -> list[_Entry]:
        """The heap that begins with the chunk of the lowest rank; an empty one if there is none."""
        self._bring_up(self._heap)
        if not self._swept:
            return self._heap
        self._bring_up(self._swept)
        if self._heap and self._swept:
            return self._heap if self._heap[0] < self._swept[0] else self._swept
        return self._heap or self._swept

    def _bring_up(self, heap: list[_Entry]) -> None:
        """Make the first entry of a heap the one of the lowest rank in it."""
        while heap:
            entry = heap[0]
            if not self._counts(entry):
                heappop(heap)
                continue
            due, nbytes, _ = self._current[entry[2]]
            if due == entry:
                return
            self._current[entry[2]] = due, nbytes, due
            heapreplace(heap, due)

    def _counts(self, entry: _Entry) -> bool:
        """Whether this is the entry of a chunk that is in the ranking; one of a chunk that left is forgotten."""
        key = entry[2]
        current = self._current.get(key)
        if current is not None:
            return current[2] is entry
        if self._left.get(key) is entry:
            del self._left[key]
        return False

    def _tidy(self) -> None:
        """Sweep a few entries while a sweep is on, and begin one when too many are outdated."""
        if not self._swept:
            if len(self._heap) <= 2 * len(self._current) + _SMALL:
                return
            self._heap, self._swept = [], self._heap
        for _ in range(min(_SWEPT, len(self._swept))):
            entry = self._swept.pop()
            if self._counts(entry):
                due, nbytes, _ = self._current[entry[2]]
                self._current[entry[2]] = due, nbytes, due
                heappush(self._heap, due)
