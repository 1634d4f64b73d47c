"""Chunks in an order that changes: a heap that hears of a higher rank only when the chunk comes up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from kvstore.key import ChunkKey

# Rank, what decides among equals, chunk: flat, because the comparisons of a large heap wait for the memory.
# The garbage collector stops looking at a tuple of these, but would go on looking at one with the chunk's object.
_Entry = tuple[float, int, ChunkKey]

# Below this many entries, outdated ones are not worth the thought.
_SMALL = 64
# Entries swept by a change: a sweep ends before a quarter as many changes as there were entries.
_SWEPT = 4


@dataclass(slots=True, eq=False)
class Ranked:
    """A chunk as one `Ranking` at a time sees it; policies keep what they know of a chunk in a subclass.

    It is changed in place: a look for one of many chunks waits for the memory, so all of it is in one place, and a
    change leaves nothing new for the garbage collector to look at.

    Attributes:
        key: the chunk.
        nbytes: its bytes, which do not change while it is ranked.
        rank: lowest first.
        turn: decides among equal ranks, lowest first.
        ranked: whether it is in the ranking now.
        entry: its entry in a heap, which is never above rank and turn; the ranking's own.
    """

    key: ChunkKey
    nbytes: int
    rank: float = 0.0
    turn: int = 0
    ranked: bool = False
    entry: _Entry | None = None


class Ranking:
    """Chunks with a rank and a size each, lowest rank first, and among equals the lowest turn.

    Most changes raise a rank, and most chunks never come up: a chunk whose rank rises keeps its entry in the heap, and
    gets another when that one is the lowest. A lower rank makes the entry outdated, and so may taking the chunk out.
    When more than half of the entries are outdated, each change from then on sweeps a few: they are taken from the end
    of the heap, of which the rest is a heap still, and those that count are entered in a second heap.

    `set`, `set_aside` and `remove` cost O(log n) each, never more. `first` and `lowest` cost that for each chunk they
    return and for each change before them, once, of a chunk that comes up: O(log n) a call, amortised.

    Args:
        chunks: all chunks that are in the ranking or set aside, by key; the policy keeps it up to date.
    """

    def __init__(self, chunks: Mapping[ChunkKey, Ranked]) -> None:
        self._chunks = chunks
        self._heap: list[_Entry] = []
        self._swept: list[_Entry] = []
        self._count = 0
        self.nbytes = 0
        """Bytes of all chunks in the ranking."""

    def set(self, chunk: Ranked, rank: float, turn: int) -> None:
        """Enter a chunk, or move it to another rank; no two have the same rank and turn."""
        if not chunk.ranked:
            chunk.ranked = True
            self._count += 1
            self.nbytes += chunk.nbytes
        chunk.rank, chunk.turn = rank, turn
        entry = chunk.entry
        if entry is None or entry[0] > rank or (entry[0] == rank and entry[1] > turn):
            chunk.entry = entry = (rank, turn, chunk.key)
            heappush(self._heap, entry)
            self._tidy()

    def set_aside(self, chunk: Ranked) -> None:
        """Take a chunk out that may come back into this ranking; nothing happens if it is not there."""
        if chunk.ranked:
            chunk.ranked = False
            self._count -= 1
            self.nbytes -= chunk.nbytes
            self._tidy()

    def remove(self, chunk: Ranked) -> None:
        """Take a chunk out that is in this ranking or was set aside: it may come into another one."""
        if self._heap and self._heap[0] is chunk.entry:
            # A victim, as a rule: nobody will have to find out that its entry is outdated.
            heappop(self._heap)
        chunk.entry = None
        self.set_aside(chunk)

    def first(self) -> Ranked:
        """The chunk of the lowest rank.

        Raises:
            IndexError: the ranking is empty.
        """
        return self._chunks[self._lowest_heap()[0][2]]

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
            missing -= self._chunks[key].nbytes
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
            rank, turn, key = entry = heap[0]
            chunk = self._chunk_of(key, entry)
            if chunk is None:
                heappop(heap)
            elif chunk.turn == turn and chunk.rank == rank:
                return
            else:
                chunk.entry = (chunk.rank, chunk.turn, key)
                heapreplace(heap, chunk.entry)

    def _chunk_of(self, key: ChunkKey, entry: _Entry) -> Ranked | None:
        """The chunk in the ranking whose entry this is, None for an outdated one; a chunk set aside forgets it."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.entry is not entry:
            return None
        if chunk.ranked:
            return chunk
        chunk.entry = None
        return None

    def _tidy(self) -> None:
        """Sweep a few entries while a sweep is on, and begin one when too many are outdated."""
        if not self._swept:
            if len(self._heap) <= 2 * self._count + _SMALL:
                return
            # The emptied list is used again: a new one would be young, and walked by the garbage collector as it grows.
            self._heap, self._swept = self._swept, self._heap
        for _ in range(min(_SWEPT, len(self._swept))):
            entry = self._swept.pop()
            chunk = self._chunk_of(entry[2], entry)
            if chunk is not None:
                chunk.entry = (chunk.rank, chunk.turn, chunk.key)
                heappush(self._heap, chunk.entry)
