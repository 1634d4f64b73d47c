"""The host tier: chunk KV in this process's memory, under a byte budget.

It never evicts of its own accord; a scheduler decides what leaves. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter

from kvstore.chunk import ChunkKV
from kvstore.errors import HostBudgetExceeded, StoreError
from kvstore.key import ChunkKey


class HostTier:
    """Chunks in memory, reservations for loads in flight, and pins.

    Bytes held and bytes reserved together never exceed the budget. A pin is a claim on a key, whether or not
    the chunk is here yet; evicting a pinned chunk is deferred until its last pin goes.

    Args:
        budget_bytes: KV bytes this tier may hold; 0 holds nothing.
        pinned: keep chunks in page-locked memory, which a GPU copies from at full speed and without waiting.

    Raises:
        StoreError: a negative budget.
    """

    def __init__(self, budget_bytes: int, pinned: bool = False):
        if budget_bytes < 0:
            raise StoreError(f"A host budget of {budget_bytes} bytes makes no sense; give 0 or more.")
        self.budget_bytes = budget_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._chunks: dict[ChunkKey, ChunkKV] = {}
        self._reserved: dict[ChunkKey, int] = {}
        self._pins: Counter[ChunkKey] = Counter()
        self._deferred: set[ChunkKey] = set()
        self._used = 0

    @property
    def bytes_used(self) -> int:
        """Bytes held and bytes reserved."""
        with self._lock:
            return self._used

    def put(self, chunk: ChunkKV) -> None:
        """Hold a chunk. One that is here already stays as it is, and a deferred eviction of it is called off.

        Raises:
            HostBudgetExceeded: it does not fit beside what is held and reserved.
        """
        chunk = _owning(chunk, self._pinned)
        key = chunk.identity.key
        with self._lock:
            self._deferred.discard(key)
            if key not in self._chunks:
                self._check_room(key, chunk.nbytes)
                self._chunks[key] = chunk
                self._used += chunk.nbytes

    def reserve(self, key: ChunkKey, nbytes: int) -> None:
        """Set room aside for a chunk being loaded; end it with `commit` or `abandon`.

        Raises:
            HostBudgetExceeded: the bytes do not fit beside what is held and reserved.
            StoreError: the key has a reservation already.
        """
        with self._lock:
            if key in self._reserved:
                raise StoreError(f"Chunk {key[:12]} is being loaded already; wait for that load.")
            self._check_room(key, nbytes)
            self._reserved[key] = nbytes
            self._used += nbytes

    def commit(self, chunk: ChunkKV) -> None:
        """Turn a reservation into the chunk it was made for.

        Raises:
            HostBudgetExceeded: the chunk is larger than what was reserved and does not fit; still reserved.
            StoreError: there is no reservation.
        """
        chunk = _owning(chunk, self._pinned)
        key = chunk.identity.key
        with self._lock:
            reserved = self._reservation(key)
            needed = 0 if key in self._chunks else chunk.nbytes
            self._check_room(key, needed - reserved)
            del self._reserved[key]
            self._used += needed - reserved
            self._chunks.setdefault(key, chunk)

    def abandon(self, key: ChunkKey) -> None:
        """Give a reservation back.

        Raises:
            StoreError: there is none.
        """
        with self._lock:
            self._used -= self._reservation(key)
            del self._reserved[key]

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The chunk, not a copy: its tensor must not be written to."""
        with self._lock:
            return self._chunks.get(key)

    def nbytes_of(self, key: ChunkKey) -> int | None:
        """KV bytes of a chunk that is here; None if it is not."""
        with self._lock:
            chunk = self._chunks.get(key)
            return None if chunk is None else chunk.nbytes

    def evict(self, key: ChunkKey) -> int:
        """Let a chunk go: bytes freed now, 0 if it is not here or its eviction waits for a pin."""
        with self._lock:
            if self._pins[key]:
                if key in self._chunks:
                    self._deferred.add(key)
                return 0
            return self._remove(key)

    def pin(self, key: ChunkKey) -> None:
        """Claim a key; pins count, so each needs its own `unpin`."""
        with self._lock:
            self._pins[key] += 1

    def unpin(self, key: ChunkKey) -> int:
        """Give one pin back: bytes freed, if that let a deferred eviction happen.

        Raises:
            StoreError: the key has no pin.
        """
        with self._lock:
            if not self._pins[key]:
                raise StoreError(f"Chunk {key[:12]} is not pinned; a pin is given back once.")
            self._pins[key] -= 1
            if self._pins[key]:
                return 0
            del self._pins[key]
            return self._remove(key) if key in self._deferred else 0

    def is_pinned(self, key: ChunkKey) -> bool:
        """Whether the key has at least one pin."""
        with self._lock:
            return self._pins[key] > 0

    def pinned_count(self) -> int:
        """How many distinct keys are pinned."""
        with self._lock:
            return len(+self._pins)

    def clear(self) -> None:
        """Let every chunk go, pinned or not; reservations and pins stay with whoever holds them."""
        with self._lock:
            for key in list(self._chunks):
                self._remove(key)

    def _check_room(self, key: ChunkKey, nbytes: int) -> None:
        free = self.budget_bytes - self._used
        if nbytes > free:
            raise HostBudgetExceeded(
                f"chunk {key[:12]} needs {nbytes} bytes, {free} of {self.budget_bytes} are free on the host"
            )

    def _reservation(self, key: ChunkKey) -> int:
        if key not in self._reserved:
            raise StoreError(f"Chunk {key[:12]} has no room reserved; reserve before commit, and end it once.")
        return self._reserved[key]

    def _remove(self, key: ChunkKey) -> int:
        self._deferred.discard(key)
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return 0
        self._used -= chunk.nbytes
        return chunk.nbytes


def _owning(chunk: ChunkKV, pinned: bool) -> ChunkKV:
    """The chunk on the host, in a storage of its own: a view would keep its whole base alive."""
    kv = chunk.kv.detach().cpu()
    if pinned:
        return ChunkKV(chunk.identity, kv.contiguous().pin_memory(), chunk.shard)
    if kv.untyped_storage().nbytes() == chunk.nbytes:
        return ChunkKV(chunk.identity, kv, chunk.shard)
    return ChunkKV(chunk.identity, kv.clone(), chunk.shard)
