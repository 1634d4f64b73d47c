"""`MemoryBudget`: the bytes of one memory tier, decided and in fact, and what may leave for more. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from cacheblend.scheduling.catalogue import PLACE_OF, Catalogue
from kvstore.eviction import EvictionPolicy
from kvstore.key import ChunkKey
from kvstore.tiers import Tier


class MemoryBudget:
    """Counts what is in a memory tier and what is on its way there; what was ordered to leave is not there any more.

    The totals are counters, so no call looks at more chunks than it names or returns.

    Args:
        tier: which.
        catalogue: says where chunks are; the scheduler keeps it up to date.
        nbytes: the budget.
        policy: orders the chunks of this tier.

    Attributes:
        nbytes: the budget.
        policy: orders the chunks; uses and advice are told it directly, all else through this class.
        used: bytes in the tier and on their way there.
        evictable: bytes in the tier that nobody holds.
    """

    def __init__(self, tier: Tier, catalogue: Catalogue, nbytes: int, policy: EvictionPolicy) -> None:
        self.tier = tier
        self.place = PLACE_OF[tier]
        self.nbytes = nbytes
        self.used = 0
        self.evictable = 0
        self.policy = policy
        self._catalogue = catalogue
        self._coming: dict[ChunkKey, int] = {}
        self._spared: list[ChunkKey] = []

    @property
    def free(self) -> int:
        """Bytes that nothing is in or on its way to."""
        return self.nbytes - self.used

    @property
    def excess(self) -> int:
        """Bytes that can leave now of those beyond the budget."""
        return min(self.used - self.nbytes, self.evictable)

    def is_coming(self, key: ChunkKey) -> bool:
        """Whether the chunk is on its way here."""
        return key in self._coming

    def expect_arrival(self, key: ChunkKey, nbytes: int) -> None:
        """The chunk was ordered here: it takes its room from now on."""
        self._coming[key] = nbytes
        self.used += nbytes

    def call_off(self, key: ChunkKey) -> None:
        """The chunk does not come; its room is free again."""
        self.used -= self._coming.pop(key, 0)

    def arrive(self, key: ChunkKey, nbytes: int, cost_s: float, confidence: float, held: bool) -> None:
        """The chunk is here now.

        Args:
            key: the chunk, not here before.
            nbytes: what it takes.
            cost_s: seconds to have it again.
            confidence: that it will be wanted soon, 0 without advice.
            held: whether it must not leave until released.
        """
        self.used += nbytes - self._coming.pop(key, 0)
        if held:
            self.policy.hold(key)
        else:
            self.evictable += nbytes
        self.policy.add(key, nbytes, cost_s)
        if confidence:
            self.policy.expect(key, confidence)

    def leave(self, key: ChunkKey, nbytes: int, held: bool) -> None:
        """The chunk, which was here with these bytes, held or not, is here no more."""
        self.used -= nbytes
        self.policy.remove(key)
        if held:
            self.policy.release(key)
        else:
            self.evictable -= nbytes

    def hold(self, key: ChunkKey, nbytes: int) -> None:
        """The chunk, which is here with these bytes and not held, must not leave until released."""
        self.evictable -= nbytes
        self.policy.hold(key)

    def use(self, key: ChunkKey, nbytes: int, hold: bool) -> None:
        """The chunk, which is here with these bytes, is used, and held if it is to be and was not."""
        if hold:
            self.evictable -= nbytes
            self.policy.hold(key)
        self.policy.touch(key)

    def release(self, key: ChunkKey, nbytes: int) -> None:
        """The chunk, which is here with these bytes and held, may leave again."""
        self.evictable += nbytes
        self.policy.release(key)

    def make_room(self, nbytes: int, spare: Collection[ChunkKey] = ()) -> list[ChunkKey] | None:
        """The chunks that must leave so that `nbytes` more fit; None if they cannot be made to.

        Chunks of `spare` that would have been among them are held from here on, until `stop_sparing`.
        """
        if nbytes > self.nbytes:
            return None
        shortage = self.used + nbytes - self.nbytes
        while 0 < shortage <= self.evictable:
            victims = self.policy.victims(shortage)
            spared = [key for key in victims if key in spare] if spare else ()
            if not spared:
                return victims
            for key in spared:
                self.hold(key, self._catalogue[key][0])
            self._spared.extend(spared)
        return [] if shortage <= 0 else None

    def stop_sparing(self) -> None:
        """What `make_room` has spared may leave again."""
        while self._spared:
            key = self._spared.pop()
            self.release(key, self._catalogue[key][0])

    def excess_victims(self) -> list[ChunkKey]:
        """What must leave to come back into the budget, as far as nobody holds it."""
        return self.policy.victims(self.excess)
