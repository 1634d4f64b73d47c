"""The memory tiers of a store: chunks on a GPU and on the host, told to those who follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from kvstore.availability import Availability
from kvstore.chunk import ChunkKV
from kvstore.errors import BudgetExceeded, ChunkUnavailable, StoreError, UnavailableReason
from kvstore.format import Allocate
from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout
from kvstore.memory import MemoryTier
from kvstore.pins import Event, PinCounts
from kvstore.tiers import Tier

ReadInto = Callable[[Allocate], tuple[ChunkKV, Tier]]
"""Reads a chunk into memory that it asks for when it knows the size; also says which tier it was read from."""


class HotTiers:
    """The memory tiers behind one face. Thread-safe.

    Tensors are copied and read outside the lock of the availability.

    Args:
        memory: the memory tiers, fastest first; they share their pins.
        availability: follows what is where.
        shard: the part of every chunk that they hold.
    """

    def __init__(self, memory: Mapping[Tier, MemoryTier], availability: Availability, shard: ShardLayout):
        self._memory = memory
        self._availability = availability
        self._shard = shard

    def get(self, identity: ChunkIdentity, tiers: Iterable[Tier]) -> tuple[ChunkKV, Tier] | None:
        """The chunk from the first of these tiers that holds it, and which one that is; see `ChunkStore.fetch`."""
        for tier in tiers:
            chunk = self._memory[tier].get(identity.key) if tier in self._memory else None
            if chunk is None:
                continue
            # The same object needs no look at hundreds of ids.
            if chunk.identity is not identity and chunk.identity != identity:
                detail = f"tier {tier} holds other token ids"
                raise ChunkUnavailable(identity.key, UnavailableReason.TOKENS_DIFFER, detail)
            return chunk, tier
        return None

    def put_on_host(self, chunk: ChunkKV) -> UnavailableReason | None:
        """Keep a chunk on the host; why it does not take it, None if it did."""
        key, host = chunk.identity.key, self._memory[Tier.HOST]
        if chunk.shard != self._shard:
            return UnavailableReason.TP_LAYOUT
        try:
            admitted = host.admit(chunk)
        except BudgetExceeded:
            return UnavailableReason.HOST_BUDGET
        with self._availability.change(key):
            host.publish(key, admitted)
            self._availability.enter(chunk.identity)
        return None

    def load_to_host(self, identity: ChunkIdentity, read: ReadInto) -> tuple[int, Tier]:
        """Have a chunk read straight into its room on the host: its bytes, and where it came from.

        Raises:
            ChunkUnavailable: `host_budget`, or what `read` raises.
        """
        room = _Room(self._memory[Tier.HOST], identity.key)
        try:
            chunk, tier = read(room.take)
            self._commit(Tier.HOST, chunk)
        except BudgetExceeded as error:
            room.give_back()
            raise ChunkUnavailable(identity.key, UnavailableReason.HOST_BUDGET, str(error)) from error
        except BaseException:
            room.give_back()
            raise
        return chunk.nbytes, tier

    def publish_on_gpu(self, identity: ChunkIdentity) -> None:
        """See `ChunkStore.publish_on_gpu`."""
        filled = self._of(Tier.GPU).reserved(identity.key)
        self._commit(Tier.GPU, ChunkKV(identity, filled, self._shard))

    def budget_bytes(self, tier: Tier) -> int:
        """See `ChunkStore.budget_bytes`."""
        return self._memory[tier].budget_bytes if tier in self._memory else 0

    def bytes_used(self, tier: Tier) -> int:
        """See `ChunkStore.bytes_used`."""
        return self._memory[tier].bytes_used if tier in self._memory else 0

    def set_budget(self, tier: Tier, nbytes: int) -> None:
        """See `ChunkStore.set_budget`."""
        self._of(tier).set_budget(nbytes)

    def evict(self, key: ChunkKey, tier: Tier, after: Event | None) -> int:
        """See `ChunkStore.evict`."""
        memory = self._of(tier)
        with self._availability.change(key):
            return memory.evict(key, after)

    def unpin(self, key: ChunkKey, pins: PinCounts, after: Event | None) -> bool:
        """Give a pin back, and let the evictions happen that waited for it: whether it was the last."""
        with self._availability.undisturbed():
            if not any(memory.is_leaving(key) for memory in self._memory.values()):
                return pins.unpin(key)
        with self._availability.change(key):
            last = pins.unpin(key)
            for memory in self._memory.values():
                memory.evict_deferred(key, after)
        return last

    def clear(self) -> None:
        """Let every chunk go, pinned or not."""
        for memory in self._memory.values():
            memory.clear()

    def _commit(self, tier: Tier, chunk: ChunkKV) -> None:
        with self._availability.change(chunk.identity.key):
            self._memory[tier].commit(chunk)
            self._availability.enter(chunk.identity)

    def _of(self, tier: Tier) -> MemoryTier:
        if tier not in self._memory:
            raise StoreError(f"The chunk store has no memory tier {tier.value!r}; open it with one.")
        return self._memory[tier]


class _Room:
    """Room in a memory tier for one load, taken once its size is known, and anew if a second source is tried."""

    def __init__(self, memory: MemoryTier, key: ChunkKey):
        self._memory = memory
        self._key = key
        self._taken = False

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.give_back()
        room = self._memory.reserve(self._key, shape, dtype)
        self._taken = True
        return room

    def give_back(self) -> None:
        if self._taken:
            self._taken = False
            self._memory.abandon(self._key)
