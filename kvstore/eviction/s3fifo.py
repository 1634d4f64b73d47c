"""S3-FIFO: what is not used again soon after it came leaves soon; what is, stays long.

After J. Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), by bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count

from kvstore.eviction.checks import check_chunk, check_confidence
from kvstore.eviction.holds import Holds
from kvstore.eviction.ranking import Ranked, Ranking
from kvstore.key import ChunkKey

SMALL_SHARE = 0.1
"""The share of the tier's bytes that newcomers may take before they are chosen as victims."""

_MOST_USES = 3
_USES_FOR_MAIN = 2
_PROBABLE = 0.5


class _Queue(Enum):
    SMALL = auto()
    MAIN = auto()
    DOOMED = auto()


@dataclass(slots=True, eq=False)
class _Entry(Ranked):
    """A chunk in the tier. Its turn is its place in the queue, ascending from the one that is looked at next.

    Attributes:
        queue: where it waits, or would if it were not held.
        uses: since it came or was last spared, at most 3.
        expected: advice spares it once.
        ghost: it is doomed and came from the small queue, so it is remembered when it leaves.
    """

    queue: _Queue = _Queue.SMALL
    uses: int = 0
    expected: bool = False
    ghost: bool = False


class S3FifoPolicy:
    """Three first-in-first-out queues of bytes: small for newcomers, main, and ghosts that are remembered by key.

    A newcomer that is used twice before its turn comes moves to main, otherwise it is doomed and, once gone,
    a ghost: a ghost that comes again goes to main at once. In main each use spares a chunk once (three at most).
    Newcomers are doomed while they take more than a tenth of the tier's bytes. Doomed chunks are the victims, in
    that order; one that is used before it leaves goes to main. A chunk that is expected with a confidence of one
    half or more is spared once.
    """

    def __init__(self) -> None:
        self._turns = count()
        self._entries: dict[ChunkKey, _Entry] = {}
        self._holds = Holds()
        self._queues: dict[_Queue, Ranking] = {queue: Ranking(self._entries) for queue in _Queue}
        self._ghosts: OrderedDict[ChunkKey, int] = OrderedDict()
        self._ghost_bytes = 0
        self._nbytes = 0

    def add(self, key: ChunkKey, nbytes: int, cost_s: float = 0.0) -> None:
        """See `EvictionPolicy.add`; the cost is not used."""
        check_chunk(key, nbytes, cost_s)
        if key in self._entries:
            self._resize(key, nbytes)
            self.touch(key)
            return
        queue = _Queue.MAIN if self._forget_ghost(key) else _Queue.SMALL
        entry = self._entries[key] = _Entry(key, nbytes, turn=next(self._turns), queue=queue)
        self._nbytes += nbytes
        self._enqueue(entry)

    def touch(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.touch`."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.queue is _Queue.DOOMED:
            self._move(entry, _Queue.MAIN)
        else:
            entry.uses = min(entry.uses + 1, _MOST_USES)

    def expect(self, key: ChunkKey, confidence: float) -> None:
        """See `EvictionPolicy.expect`; each call with one half or more spares the chunk once."""
        check_confidence(key, confidence)
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.expected = confidence >= _PROBABLE
        if entry.expected and entry.queue is _Queue.DOOMED:
            entry.expected = False
            self._move(entry, _Queue.MAIN)

    def remove(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.remove`; only a victim that leaves becomes a ghost."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._queues[entry.queue].remove(entry)
        self._nbytes -= entry.nbytes
        if entry.ghost:
            self._remember_ghost(key, entry.nbytes)

    def hold(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.hold`."""
        self._holds.hold(key)
        entry = self._entries.get(key)
        if entry is not None:
            self._queues[entry.queue].set_aside(entry)

    def release(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.release`."""
        if self._holds.release(key) and key in self._entries:
            self._enqueue(self._entries[key])

    def victims(self, nbytes: int) -> list[ChunkKey]:
        """See `EvictionPolicy.victims`."""
        if nbytes > sum(queue.nbytes for queue in self._queues.values()):
            return []
        while self._queues[_Queue.DOOMED].nbytes < nbytes:
            self._take_turn()
        return self._queues[_Queue.DOOMED].lowest(nbytes)

    def _take_turn(self) -> None:
        """Look at the next chunk, and spare or doom it."""
        small, main = self._queues[_Queue.SMALL], self._queues[_Queue.MAIN]
        from_small = small.nbytes > SMALL_SHARE * self._nbytes or not main.nbytes
        entry = self._entries[(small if from_small else main).first().key]
        if entry.expected:
            entry.expected = False
            self._move(entry, entry.queue)
        elif from_small and entry.uses >= _USES_FOR_MAIN:
            entry.uses = 0
            self._move(entry, _Queue.MAIN)
        elif not from_small and entry.uses:
            entry.uses -= 1
            self._move(entry, _Queue.MAIN)
        else:
            self._move(entry, _Queue.DOOMED)
            entry.ghost = from_small

    def _move(self, entry: _Entry, queue: _Queue) -> None:
        """Put a chunk at the end of a queue."""
        self._queues[entry.queue].remove(entry)
        entry.queue, entry.turn, entry.ghost = queue, next(self._turns), False
        if queue is _Queue.DOOMED:
            entry.uses = 0
        self._enqueue(entry)

    def _enqueue(self, entry: _Entry) -> None:
        if entry.key not in self._holds:
            self._queues[entry.queue].set(entry, entry.turn, entry.turn)

    def _resize(self, key: ChunkKey, nbytes: int) -> None:
        entry = self._entries[key]
        self._nbytes += nbytes - entry.nbytes
        self._queues[entry.queue].set_aside(entry)
        entry.nbytes = nbytes
        self._enqueue(entry)

    def _remember_ghost(self, key: ChunkKey, nbytes: int) -> None:
        """Remember a victim, and forget the oldest beyond the bytes that are in the tier."""
        self._ghosts[key] = nbytes
        self._ghost_bytes += nbytes
        while self._ghost_bytes > self._nbytes:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def _forget_ghost(self, key: ChunkKey) -> bool:
        """Forget a ghost, and return whether it was one."""
        nbytes = self._ghosts.pop(key, 0)
        self._ghost_bytes -= nbytes
        return nbytes > 0
