"""Least recently used first."""

from __future__ import annotations

from itertools import count

from kvstore.eviction.checks import check_chunk, check_confidence
from kvstore.eviction.holds import Holds
from kvstore.eviction.ranking import Ranked, Ranking
from kvstore.key import ChunkKey


class LruPolicy:
    """Evicts the chunk whose last use is longest ago. Knows no cost, and takes no advice."""

    def __init__(self) -> None:
        self._uses = count()
        self._chunks: dict[ChunkKey, Ranked] = {}
        self._holds = Holds()
        self._ranking = Ranking(self._chunks)

    def add(self, key: ChunkKey, nbytes: int, cost_s: float = 0.0) -> None:
        """See `EvictionPolicy.add`; the cost is not used."""
        check_chunk(key, nbytes, cost_s)
        chunk = self._chunks.setdefault(key, Ranked(key, nbytes))
        if chunk.nbytes != nbytes:
            self._ranking.set_aside(chunk)
            chunk.nbytes = nbytes
        self._use(chunk)

    def touch(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.touch`."""
        if key in self._chunks:
            self._use(self._chunks[key])

    def expect(self, key: ChunkKey, confidence: float) -> None:
        """See `EvictionPolicy.expect`; the order does not change."""
        check_confidence(key, confidence)

    def remove(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.remove`."""
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._ranking.remove(chunk)

    def hold(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.hold`."""
        self._holds.hold(key)
        if key in self._chunks:
            self._ranking.set_aside(self._chunks[key])

    def release(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.release`."""
        if self._holds.release(key) and key in self._chunks:
            self._enter(self._chunks[key])

    def victims(self, nbytes: int) -> list[ChunkKey]:
        """See `EvictionPolicy.victims`."""
        return self._ranking.lowest(nbytes) if nbytes <= self._ranking.nbytes else []

    def _use(self, chunk: Ranked) -> None:
        chunk.turn = next(self._uses)
        if chunk.key not in self._holds:
            self._enter(chunk)

    def _enter(self, chunk: Ranked) -> None:
        self._ranking.set(chunk, chunk.turn, chunk.turn)
