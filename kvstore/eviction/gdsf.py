"""GreedyDual-Size-Frequency: what is used often and dear to have again, for its bytes, stays.

After L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (HP
Laboratories, 1998), with the seconds to have a chunk again as its cost.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(slots=True)
class _Entry:
    """A chunk in the tier.

    Attributes:
        nbytes: what it takes.
        cost_s: seconds to have it again.
        uses: since it came into the tier, as far as they count.
        age: the policy's age when it was last used.
        confidence: that it will be used soon, 0 to 1.
        rank: its priority, and when it was set, which decides among equals.
        proposed: it was named a victim and nothing happened to it since.
    """

    nbytes: int
    cost_s: float
    uses: int = 0
    age: float = 0.0
    confidence: float = 0.0
    rank: tuple[float, int] = (0.0, 0)
    proposed: bool = False

    def priority(self, age: float) -> float:
        """Seconds saved a byte, above the age: the mean of what it is unused and of what a use now would make it."""
        worth = max(self.cost_s, _LEAST_COST_S) / self.nbytes
        unused = self.age + self.uses * worth
        used = age + min(self.uses + 1, _MOST_USES) * worth
        return unused + self.confidence * (used - unused)


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
        self._ranking: Ranking[tuple[float, int]] = Ranking()

    def add(self, key: ChunkKey, nbytes: int, cost_s: float = 0.0) -> None:
        """See `EvictionPolicy.add`."""
        check_chunk(key, nbytes, cost_s)
        entry = self._entries.setdefault(key, _Entry(nbytes, cost_s))
        entry.nbytes, entry.cost_s = nbytes, cost_s
        self._use(key, entry)

    def touch(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.touch`."""
        if key in self._entries:
            self._use(key, self._entries[key])

    def expect(self, key: ChunkKey, confidence: float) -> None:
        """See `EvictionPolicy.expect`; what was said holds over uses, until other advice."""
        check_confidence(key, confidence)
        if key in self._entries:
            self._entries[key].confidence = confidence
            self._rank(key)

    def remove(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.remove`; only a proposed victim that leaves makes the others age."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.proposed:
            self._age = max(self._age, entry.rank[0])
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
        if nbytes > self._ranking.nbytes:
            return []
        chosen = self._ranking.lowest(nbytes)
        for key in chosen:
            self._entries[key].proposed = True
        return chosen

    def _use(self, key: ChunkKey, entry: _Entry) -> None:
        entry.uses = min(entry.uses + 1, _MOST_USES)
        entry.age = self._age
        self._rank(key)

    def _rank(self, key: ChunkKey) -> None:
        entry = self._entries[key]
        entry.rank = entry.priority(self._age), next(self._changes)
        entry.proposed = False
        self._enter(key)

    def _enter(self, key: ChunkKey) -> None:
        if key not in self._holds:
            entry = self._entries[key]
            self._ranking.set(key, entry.rank, entry.nbytes)
