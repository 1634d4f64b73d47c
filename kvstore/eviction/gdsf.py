"""GreedyDual-Size-Frequency: what is used often and dear to have again, for its bytes, stays.

After L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (HP
Laboratories, 1998), with the seconds to have a chunk again as its cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.eviction.checks import check_chunk, check_confidence
from kvstore.eviction.holds import Holds
from kvstore.eviction.ranking import Ranked, Ranking
from kvstore.key import ChunkKey

# Chunks that cost nothing to have again are still told apart by frequency and size.
_LEAST_COST_S = 1e-9
# Sessions use their documents turn after turn and then no more: counts beyond this keep what is over. Chosen on the
# trace and the Zipf traffic of eval.trace; 1 is GreedyDual-Size, no bound the original.
_MOST_USES = 2


@dataclass(slots=True, eq=False)
class _Chunk(Ranked):
    """A chunk in the tier. Its rank is its priority, its turn when that was set.

    Attributes:
        worth: seconds to have it again for each of its bytes.
        uses: as far as they count.
        age: the policy's when the chunk was last used.
        confidence: that it will be used soon.
    """

    worth: float = 0.0
    uses: int = 0
    age: float = 0.0
    confidence: float = 0.0


class GdsfPolicy:
    """Evicts the chunk of the lowest priority: age at its last use + uses * cost / bytes, of the uses two at most.

    The policy's age rises to the priority of each victim that leaves, so that what was popular once and is not
    used again is overtaken. A chunk that is expected with confidence c has the
    mean of its priority as it is, weighted 1 - c, and of its priority if it were used now, weighted c. Among equal
    priorities the one that was set first goes first.
    """

    def __init__(self) -> None:
        self._age = 0.0
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._holds = Holds()
        self._changes = 0
        # Named victims to which nothing happened since.
        self._proposed: set[ChunkKey] = set()
        self._ranking = Ranking(self._chunks)

    def add(self, key: ChunkKey, nbytes: int, cost_s: float = 0.0) -> None:
        """See `EvictionPolicy.add`."""
        check_chunk(key, nbytes, cost_s)
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = _Chunk(key, nbytes)
        elif chunk.nbytes != nbytes:
            self._ranking.set_aside(chunk)
            chunk.nbytes = nbytes
        chunk.worth = max(cost_s, _LEAST_COST_S) / nbytes
        self._use(chunk)

    def touch(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.touch`."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._use(chunk)

    def expect(self, key: ChunkKey, confidence: float) -> None:
        """See `EvictionPolicy.expect`; what was said holds over uses, until other advice."""
        check_confidence(key, confidence)
        chunk = self._chunks.get(key)
        if chunk is not None:
            chunk.confidence = confidence
            self._rank(chunk)

    def remove(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.remove`; only a proposed victim that leaves makes the others age."""
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return
        if key in self._proposed:
            self._proposed.discard(key)
            self._age = max(self._age, chunk.rank)
        self._ranking.remove(chunk)

    def hold(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.hold`."""
        self._holds.hold(key)
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._ranking.set_aside(chunk)

    def release(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.release`."""
        chunk = self._chunks.get(key)
        if self._holds.release(key) and chunk is not None:
            self._ranking.set(chunk, chunk.rank, chunk.turn)

    def victims(self, nbytes: int) -> list[ChunkKey]:
        """See `EvictionPolicy.victims`."""
        if nbytes > self._ranking.nbytes:
            return []
        chosen = self._ranking.lowest(nbytes)
        self._proposed.update(chosen)
        return chosen

    def _use(self, chunk: _Chunk) -> None:
        if chunk.uses < _MOST_USES:
            chunk.uses += 1
        chunk.age = self._age
        self._rank(chunk)

    def _rank(self, chunk: _Chunk) -> None:
        """Give a chunk the priority that follows from what is known of it."""
        key, priority = chunk.key, chunk.age + chunk.uses * chunk.worth
        if chunk.confidence:
            uses = chunk.uses + 1 if chunk.uses < _MOST_USES else _MOST_USES
            used = self._age + uses * chunk.worth
            priority += chunk.confidence * (used - priority)
        self._changes = turn = self._changes + 1
        self._proposed.discard(key)
        if key in self._holds:
            chunk.rank, chunk.turn = priority, turn
        else:
            self._ranking.set(chunk, priority, turn)
