"""GreedyDual-Size-Frequency: what is used often and dear to have again, for its bytes, stays.

After L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (HP
Laboratories, 1998), with the seconds to have a chunk again as its cost.
"""

from __future__ import annotations

from itertools import count

from kvstore.eviction.checks import check_chunk, check_confidence
from kvstore.eviction.holds import Holds
from kvstore.eviction.ranking import Ranking
from kvstore.key import ChunkKey

# Chunks that cost nothing to have again are still told apart by frequency and size.
_LEAST_COST_S = 1e-9
# Sessions use their documents turn after turn and then no more: counts beyond this keep what is over. Chosen on the
# trace and the Zipf traffic of eval.trace; 1 is GreedyDual-Size, no bound the original.
_MOST_USES = 2


# A chunk in the tier: bytes, seconds to have it again, uses as far as they count, the policy's age when it was last
# used, confidence that it will be soon, its priority, and when that was set, which decides among equals. A bare tuple
# of numbers, because the garbage collector stops looking at those.
_Entry = tuple[int, float, int, float, float, float, int]
_NEW: _Entry = (0, 0.0, 0, 0.0, 0.0, 0.0, 0)


class GdsfPolicy:
    """Evicts the chunk of the lowest priority: age at its last use + uses * cost / bytes, of the uses two at most.

    The policy's age rises to the priority of each victim that leaves, so that what was popular once and is not
    used again is overtaken. A chunk that is expected with confidence c has the
    mean of its priority as it is, weighted 1 - c, and of its priority if it were used now, weighted c. Among equal
    priorities the one that was set first goes first.
    """

    def __init__(self) -> None:
        self._age = 0.0
        self._entries: dict[ChunkKey, _Entry] = {}
        self._holds = Holds()
        self._changes = count()
        # Named victims to which nothing happened since.
        self._proposed: set[ChunkKey] = set()
        self._ranking = Ranking()

    def add(self, key: ChunkKey, nbytes: int, cost_s: float = 0.0) -> None:
        """See `EvictionPolicy.add`."""
        check_chunk(key, nbytes, cost_s)
        _, _, uses, _, confidence, _, _ = self._entries.get(key, _NEW)
        self._set(key, nbytes, cost_s, min(uses + 1, _MOST_USES), self._age, confidence)

    def touch(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.touch`."""
        entry = self._entries.get(key)
        if entry is not None:
            nbytes, cost_s, uses, _, confidence, _, _ = entry
            self._set(key, nbytes, cost_s, min(uses + 1, _MOST_USES), self._age, confidence)

    def expect(self, key: ChunkKey, confidence: float) -> None:
        """See `EvictionPolicy.expect`; what was said holds over uses, until other advice."""
        check_confidence(key, confidence)
        entry = self._entries.get(key)
        if entry is not None:
            nbytes, cost_s, uses, age, _, _, _ = entry
            self._set(key, nbytes, cost_s, uses, age, confidence)

    def remove(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.remove`; only a proposed victim that leaves makes the others age."""
        entry = self._entries.pop(key, None)
        if key in self._proposed and entry is not None:
            self._proposed.discard(key)
            self._age = max(self._age, entry[5])
        self._ranking.discard(key)

    def hold(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.hold`."""
        self._holds.hold(key)
        self._ranking.discard(key)

    def release(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.release`."""
        entry = self._entries.get(key)
        if self._holds.release(key) and entry is not None:
            nbytes, _, _, _, _, priority, turn = entry
            self._ranking.set(key, nbytes, priority, turn)

    def victims(self, nbytes: int) -> list[ChunkKey]:
        """See `EvictionPolicy.victims`."""
        if nbytes > self._ranking.nbytes:
            return []
        chosen = self._ranking.lowest(nbytes)
        self._proposed.update(chosen)
        return chosen

    def _set(self, key: ChunkKey, nbytes: int, cost_s: float, uses: int, age: float, confidence: float) -> None:
        worth = max(cost_s, _LEAST_COST_S) / nbytes
        unused = age + uses * worth
        used = self._age + min(uses + 1, _MOST_USES) * worth
        priority, turn = unused + confidence * (used - unused), next(self._changes)
        self._entries[key] = nbytes, cost_s, uses, age, confidence, priority, turn
        self._proposed.discard(key)
        if key not in self._holds:
            self._ranking.set(key, nbytes, priority, turn)
