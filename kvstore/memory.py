"""A memory tier: chunks in memory under a byte budget, on the host or on a GPU.

It never evicts of its own accord; a scheduler decides what leaves. A chunk goes through these states:

    reserve  ->  commit  ->  evict  ->  (its memory is free again)
        \\->  abandon              \\->  (deferred while it is pinned)

Memory is given to another chunk only when the tier has let it go, the work that was queued on it is over
(`after`), and no tensor looks into it any more: what `get` returned stays valid for as long as it is held.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from kvstore.blocks import no_inference_mode
from kvstore.chunk import ChunkKV
from kvstore.errors import BudgetExceeded, StoreError
from kvstore.key import ChunkKey
from kvstore.pins import Event, PinCounts
from kvstore.tensor_memory import TensorMemory
from kvstore.tiers import Tier


class MemoryTier:
    """Chunks in memory, reservations for transfers in flight, and evictions that wait. Thread-safe.

    Bytes held, reserved, and waiting for queued work together never exceed the budget. A pin is a claim on a
    key, whether or not the chunk is here yet; evicting a pinned chunk is deferred until its last pin goes.

    Args:
        budget_bytes: KV bytes this tier may hold; 0 holds nothing.
        memory: where the tensors live.
        tier: which tier it is.
        pins: shared with other tiers; None for pins of its own.

    Raises:
        StoreError: a negative budget, or more than the memory has.
    """

    def __init__(self, budget_bytes: int, memory: TensorMemory, tier: Tier = Tier.HOST, pins: PinCounts | None = None):
        self.tier = tier
        self.pins = PinCounts() if pins is None else pins
        self._memory = memory
        self._lock = threading.Lock()
        self._chunks: dict[ChunkKey, ChunkKV] = {}
        self._reserved: dict[ChunkKey, torch.Tensor] = {}
        self._deferred: dict[ChunkKey, list[Event]] = {}
        self._leaving: list[tuple[list[Event], torch.Tensor]] = []
        self._used = 0
        self.set_budget(budget_bytes)

    @property
    def bytes_used(self) -> int:
        """Bytes held, bytes reserved, and bytes of chunks that left but that queued work may still read."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def largest_free(self) -> int:
        """Bytes of the largest chunk that would find room now; less than what the budget leaves, when the free
        memory lies in pieces."""
        with self._lock:
            self._collect()
            room = max(self.budget_bytes - self._used, 0)
            in_one_piece = self._memory.largest_free
            return room if in_one_piece is None else min(room, in_one_piece)

    def set_budget(self, nbytes: int) -> None:
        """Change the budget. A smaller one counts for new room at once; what is over it stays until evicted.

        Raises:
            StoreError: a negative budget, or more than the memory has.
        """
        if nbytes < 0:
            raise StoreError(f"A {self.tier} budget of {nbytes} bytes makes no sense; give 0 or more.")
        self._memory.grow(nbytes)
        self.budget_bytes = nbytes

    def put(self, chunk: ChunkKV) -> None:
        """Hold a chunk. One that is here already stays as it is, and a deferred eviction of it is called off.

        Raises:
            BudgetExceeded: it does not fit beside what is held and reserved.
        """
        self.publish(chunk.identity.key, self.admit(chunk))

    def admit(self, chunk: ChunkKV) -> ChunkKV | None:
        """The longer half of `put`: take room and copy the chunk there if it cannot stay where it is.

        Returns:
            What `publish` must be called with.

        Raises:
            BudgetExceeded: it does not fit beside what is held and reserved.
        """
        key, nbytes = chunk.identity.key, chunk.nbytes
        with self._lock:
            if key in self._chunks:
                return None
            self._check_room(key, nbytes)
            adopted = self._memory.adopt(chunk.kv.detach())
            room = self._allocate(key, nbytes) if adopted is None else adopted
            self._used += nbytes
        if adopted is not None:
            return ChunkKV(chunk.identity, adopted, chunk.shard)
        try:
            return ChunkKV(chunk.identity, _as_kv(room, chunk.kv.shape, chunk.kv.dtype).copy_(chunk.kv), chunk.shard)
        except BaseException:
            with self._lock:
                self._used -= nbytes
            raise

    def publish(self, key: ChunkKey, admitted: ChunkKV | None) -> None:
        """The shorter half of `put`: the chunk is here from now on."""
        with self._lock:
            self._deferred.pop(key, None)
            if admitted is not None:
                self._keep(admitted)

    def reserve(self, key: ChunkKey, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Set room aside for a chunk on its way; end it with `commit` or `abandon`.

        Returns:
            The tensor to fill, of that shape and dtype, contiguous, with a storage of its own.

        Raises:
            BudgetExceeded: it does not fit beside what is held and reserved.
            StoreError: the key has a reservation already.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            if key in self._reserved:
                raise StoreError(f"Chunk {key[:12]} is being loaded already; wait for that load.")
            self._check_room(key, nbytes)
            self._reserved[key] = _as_kv(self._allocate(key, nbytes), shape, dtype)
            self._used += nbytes
            return self._reserved[key]

    def reserved(self, key: ChunkKey) -> torch.Tensor:
        """The tensor that `reserve` gave.

        Raises:
            StoreError: there is no reservation.
        """
        with self._lock:
            return self._reservation(key)

    def commit(self, chunk: ChunkKV) -> None:
        """Turn a reservation into the chunk it was made for, whose KV is the tensor that `reserve` gave.

        If the chunk has come here in another way meanwhile, the earlier one stays.

        Raises:
            StoreError: there is no reservation, or the KV is another tensor.
        """
        key = chunk.identity.key
        with self._lock:
            room = self._reservation(key)
            if (room.data_ptr(), room.nbytes) != (chunk.kv.data_ptr(), chunk.nbytes):
                raise StoreError(f"Chunk {key[:12]} is not in the room reserved for it; fill the tensor of `reserve`.")
            del self._reserved[key]
            self._keep(chunk)

    def abandon(self, key: ChunkKey, after: Event | None = None) -> None:
        """Give a reservation back.

        Args:
            after: queued work that still writes to it; the room is given to nobody else before it is over.

        Raises:
            StoreError: there is none.
        """
        with self._lock:
            room = self._reservation(key)
            del self._reserved[key]
            self._let_go(room, [after] if after else [])

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The chunk, not a copy: its tensor must not be written to."""
        with self._lock:
            return self._chunks.get(key)

    def nbytes_of(self, key: ChunkKey) -> int | None:
        """KV bytes of a chunk that is here; None if it is not."""
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.nbytes

    def evict(self, key: ChunkKey, after: Event | None = None) -> int:
        """Let a chunk go: bytes that left, 0 if it is not here or its eviction waits for a pin.

        Args:
            after: queued work that still reads it; its memory is given to nobody else before that is over.
                None on a GPU stands for what the calling thread has queued on its current stream.
        """
        with self._lock:
            if key not in self._chunks:
                return 0
            if key in self.pins:
                self._defer(key, after)
                return 0
            return self._remove(key, after)

    def is_leaving(self, key: ChunkKey) -> bool:
        """Whether the chunk's eviction waits for a pin."""
        return key in self._deferred

    def evict_deferred(self, key: ChunkKey, after: Event | None = None) -> int:
        """A pin was given back: let an eviction happen that waited for it, if no other is left: bytes that left.

        Args:
            after: as of `evict`; if other pins are left, the eviction waits for this work as well.
        """
        with self._lock:
            if key not in self._deferred:
                return 0
            if key in self.pins:
                self._defer(key, after)
                return 0
            return self._remove(key, after)

    def pin(self, key: ChunkKey) -> None:
        """Claim a key; pins count, so each needs its own `unpin`."""
        self.pins.pin(key)

    def unpin(self, key: ChunkKey, after: Event | None = None) -> int:
        """Give one pin back: bytes that left, if that let a deferred eviction happen.

        Raises:
            StoreError: the key has no pin.
        """
        self.pins.unpin(key)
        return self.evict_deferred(key, after)

    def clear(self) -> None:
        """Let every chunk go, pinned or not; reservations and pins stay with whoever holds them."""
        with self._lock:
            for key in list(self._chunks):
                self._remove(key, None)

    def _check_room(self, key: ChunkKey, nbytes: int) -> None:
        self._collect()
        free = self.budget_bytes - self._used
        if nbytes > free:
            raise BudgetExceeded(
                f"chunk {key[:12]} needs {nbytes} bytes, {free} of {self.budget_bytes} are free in tier {self.tier}",
                soon=nbytes <= free + self._bytes_leaving(),
            )

    def _allocate(self, key: ChunkKey, nbytes: int) -> torch.Tensor:
        room = self._memory.allocate(nbytes)
        if room is None:
            raise BudgetExceeded(
                f"chunk {key[:12]} needs {nbytes} bytes in one piece, "
                f"{self._memory.largest_free} is the largest free piece of tier {self.tier}",
                # Which pieces will be neighbours then is not known; so it is tried until nothing leaves any more.
                soon=self._bytes_leaving() > 0,
            )
        return room

    def _reservation(self, key: ChunkKey) -> torch.Tensor:
        if key not in self._reserved:
            raise StoreError(f"Chunk {key[:12]} has no room reserved; reserve before commit, and end it once.")
        return self._reserved[key]

    def _keep(self, chunk: ChunkKV) -> None:
        """Enter a chunk whose room is counted already."""
        if chunk.identity.key in self._chunks:
            self._used -= chunk.nbytes
        else:
            self._chunks[chunk.identity.key] = chunk

    def _defer(self, key: ChunkKey, after: Event | None) -> None:
        # The fence is set here: who gives the last pin back may be a thread with another stream.
        event = after or self._memory.fence()
        self._deferred.setdefault(key, []).extend([event] if event else [])

    def _remove(self, key: ChunkKey, after: Event | None) -> int:
        events = self._deferred.pop(key, [])
        chunk = self._chunks.pop(key)
        if after := after or self._memory.fence():
            events.append(after)
        self._let_go(chunk.kv, events)
        return chunk.nbytes

    def _let_go(self, kv: torch.Tensor, events: list[Event]) -> None:
        if events:
            self._leaving.append((events, kv))
        else:
            self._used -= kv.nbytes

    def _bytes_leaving(self) -> int:
        return sum(kv.nbytes for _, kv in self._leaving)

    def _collect(self) -> None:
        """Take back what left and what no queued work reads any more."""
        leaving, self._leaving = self._leaving, []
        for events, kv in leaving:
            if all(event.query() for event in events):
                self._used -= kv.nbytes
            else:
                self._leaving.append((events, kv))


def _as_kv(room: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # Whoever fills it may be outside the inference mode that it was reserved in.
    with no_inference_mode():
        return room.view(dtype).view(*shape)
