"""Least recently used first."""

from __future__ import annotations

from itertools import count

from kvstore.eviction.checks import check_chunk, check_confidence
from kvstore.eviction.holds import Holds
from kvstore.eviction.ranking import Ranking
from kvstore.key import ChunkKey


class LruPolicy:
    """Evicts the chunk whose last use is longest ago. Knows no cost, and takes no advice."""

    def __init__(self) -> None:
        self._uses = count()
        self._entries: dict[ChunkKey, tuple[int, int]] = {}
        self._holds = Holds()
        self._ranking = Ranking()

    def add(self, key: ChunkKey, nbytes: int, cost_s: float = 0.0) -> None:
        """See `EvictionPolicy.add`; the cost is not used."""
        check_chunk(key, nbytes, cost_s)
        self._use(key, nbytes)

    def touch(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.touch`."""
        if key in self._entries:
            self._use(key, self._entries[key][1])

    def expect(self, key: ChunkKey, confidence: float) -> None:
        """See `EvictionPolicy.expect`; the order does not change."""
        check_confidence(key, confidence)

    def remove(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.remove`."""
        self._entries.pop(key, None)
        self._ranking.discard(key)

    def hold(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.hold`."""
        self._holds.hold(key)
        self._ranking.discard(key)

    def release(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.release`."""
        if self._holds.release(key) and key in self._entries:
            self._enter(key)

    def victims(self, nbytes: int) -> list[ChunkKey]:
        """See `EvictionPolicy.victims`."""
        return self._ranking.lowest(nbytes) if nbytes <= self._ranking.nbytes else []

    def _use(self, key: ChunkKey, nbytes: int) -> None:
        self._entries[key] = next(self._uses), nbytes
        if key not in self._holds:
            self._enter(key)

    def _enter(self, key: ChunkKey) -> None:
        use, nbytes = self._entries[key]
        self._ranking.set(key, nbytes, use)
