"""What a policy of eviction answers: which chunks of a memory tier go next. It proposes; the scheduler decides."""

from __future__ import annotations

from typing import Protocol

from kvstore.key import ChunkKey


class EvictionPolicy(Protocol):
    """Orders the chunks of one memory tier. Not thread-safe: it belongs to one scheduler.

    Every call costs O(log n), amortised, in the number n of chunks in the tier; `victims` costs that for each
    victim. Held chunks are set aside and cost `victims` nothing, however many they are.
    """

    def add(self, key: ChunkKey, nbytes: int, cost_s: float = 0.0) -> None:
        """The chunk is now in the tier; counts as a use, also for a chunk that was there before.

        Args:
            key: the chunk.
            nbytes: what it takes in the tier, above 0.
            cost_s: seconds to have it again, the cheaper of reloading and recomputing it.

        Raises:
            StoreError: `nbytes` is not above 0, or `cost_s` is negative or not finite.
        """
        ...

    def touch(self, key: ChunkKey) -> None:
        """The chunk was used; nothing happens if it is not in the tier."""
        ...

    def expect(self, key: ChunkKey, confidence: float) -> None:
        """Advice: the chunk will probably be wanted soon; nothing happens if it is not in the tier.

        Args:
            key: the chunk.
            confidence: the probability, 0 to 1; it replaces what was said before, and 0 takes that back.

        Raises:
            StoreError: `confidence` is outside 0 to 1.
        """
        ...

    def remove(self, key: ChunkKey) -> None:
        """The chunk left the tier; nothing happens if it was not there. Holds on it stay until released."""
        ...

    def hold(self, key: ChunkKey) -> None:
        """The chunk is no victim until released as often as it was held; it may be held before it is added."""
        ...

    def release(self, key: ChunkKey) -> None:
        """Take back one `hold`. The chunk is again where it was in the order: neither call is a use.

        Raises:
            StoreError: the chunk is not held.
        """
        ...

    def victims(self, nbytes: int) -> list[ChunkKey]:
        """Chunks that are not held and together free at least `nbytes`, best victim first; the last one is needed.

        Nothing is removed, and the same question has the same answer until something changes. Empty when nothing
        need go, and when even all that are not held would not be enough: then evicting any would be in vain.
        """
        ...
