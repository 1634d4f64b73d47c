"""What a store can serve at this moment, and the events that tell of every change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from kvstore.errors import UnavailableReason
from kvstore.events import EventQueue, Evicted, Published
from kvstore.index import ChunkIndex, IndexEntry
from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout, content_digest
from kvstore.memory import MemoryTier
from kvstore.tiers import ChunkRecord, Tier

REASONS_KEPT = 16_384
"""Chunks whose reason for being gone is remembered, those that went last."""


class Availability:
    """Chunks by the tiers that can serve them: the memory tiers, and what is known of the cold ones. Thread-safe.

    A chunk on disk exists once every rank's shard does. Beside a disk the same holds for copies in memory;
    without one, a process vouches for its own rank.

    Args:
        memory: the memory tiers, fastest first; their chunks come and go inside `change` only.
        events: where changes are told.
        shard: the part of every chunk that this process serves.
        has_disk: whether there is a disk tier.
        vouches_alone: a chunk exists once this rank's shard does; whoever asks joins the ranks.
    """

    def __init__(
        self,
        memory: Mapping[Tier, MemoryTier],
        events: EventQueue,
        shard: ShardLayout,
        has_disk: bool,
        vouches_alone: bool = False,
    ):
        self._memory = memory
        self._events = events
        self._shard = shard
        self._has_disk = has_disk
        self._vouches_alone = vouches_alone
        self._index = ChunkIndex()
        self._reasons_gone: OrderedDict[ChunkKey, UnavailableReason] = OrderedDict()
        # Never held while tensors are read or written, nor while listeners run.
        self._lock = threading.RLock()

    def tiers(self, key: ChunkKey, shard: ShardLayout | None = None) -> dict[Tier, int]:
        """The tiers that can serve the chunk's shard, fastest first, each with its KV bytes."""
        with self._lock:
            entry = self._index.get(key)
            return {} if entry is None else self._tiers_of(entry, shard or self._shard)

    def _tiers_of(self, entry: IndexEntry, shard: ShardLayout) -> dict[Tier, int]:
        on_disk = False
        if entry.on_disk:
            on_disk = shard in entry.on_disk if self._vouches_alone else entry.complete_on_disk(shard.size)
        tiers: dict[Tier, int] = {}
        if (shard is self._shard or shard == self._shard) and (
            on_disk or self._vouches_alone or shard.size == 1 or not self._has_disk
        ):
            tiers = self._in_memory(entry.key)
        if on_disk:
            tiers[Tier.DISK] = entry.on_disk[shard]
        if entry.on_remote and shard in entry.on_remote:
            tiers[Tier.REMOTE] = entry.on_remote[shard]
        return tiers

    def records(self) -> list[ChunkRecord]:
        """Every chunk that can be served."""
        with self._lock:
            served = [(entry, self.tiers(entry.key)) for entry in self._index]
        return [
            ChunkRecord(entry.key, max(tiers.values()), entry.tokens, frozenset(tiers))
            for entry, tiers in served
            if tiers
        ]

    def find(
        self, candidates: Sequence[ChunkIdentity], fingerprint: str, token_ids: Sequence[int]
    ) -> tuple[ChunkIdentity | None, UnavailableReason | None]:
        """The first candidate that can be served, or None and why; see `ChunkStore.find`."""
        with self._lock:
            for identity in candidates:
                if self.tiers(identity.key):
                    return identity, None
            return None, self._why_none(candidates, fingerprint, token_ids)

    def on_disk(self, key: ChunkKey) -> tuple[str, list[ShardLayout]]:
        """The chunk's fingerprint and its shards known to be on disk; empty when it is not known."""
        with self._lock:
            entry = self._index.get(key)
            return (entry.fingerprint, list(entry.on_disk)) if entry else ("", [])

    def all_on_disk(self) -> set[tuple[ChunkKey, ShardLayout]]:
        """Every shard known to be on disk."""
        with self._lock:
            return {(entry.key, shard) for entry in self._index for shard in entry.on_disk}

    @contextmanager
    def change(self, key: ChunkKey) -> Iterator[None]:
        """Change where one chunk is, alone; afterwards listeners hear what that did to what can be served."""
        with self._lock:
            entry = self._index.get(key)
            before = {} if entry is None else self._tiers_of(entry, self._shard)
            yield
            entry = self._index.get(key) or entry
            if entry is not None:
                after = self._tiers_of(entry, self._shard)
                self._tell(entry, before, after)
                if not (after or entry.on_disk or entry.on_remote or self._in_memory(key)):
                    self._index.drop(key)
        self._events.deliver()

    def undisturbed(self) -> AbstractContextManager[object]:
        """Nothing changes meanwhile, nor is anything changed: cheaper than `change`."""
        return self._lock

    def enter(self, identity: ChunkIdentity) -> None:
        """Inside `change`: the chunk is in a memory tier."""
        self._index.entry_for(identity)

    def enter_on_disk(self, identity: ChunkIdentity, shard: ShardLayout, nbytes: int) -> None:
        """Inside `change`: this shard of `nbytes` is on disk."""
        self._index.entry_for(identity).on_disk[shard] = nbytes

    def leave_disk(self, key: ChunkKey, shard: ShardLayout) -> None:
        """Inside `change`: this shard is no longer on disk."""
        entry = self._index.get(key)
        if entry is not None:
            entry.on_disk.pop(shard, None)

    def enter_on_remote(self, identity: ChunkIdentity, shard: ShardLayout, nbytes: int) -> None:
        """Inside `change`: every rank's shard of this size is on the remote, this one with `nbytes`."""
        self._index.entry_for(identity).on_remote[shard] = nbytes

    def leave_remote(self, key: ChunkKey) -> tuple[str, list[ShardLayout]]:
        """Inside `change`: the chunk is no longer on the remote; its fingerprint and the shards that were."""
        entry = self._index.get(key)
        if entry is None:
            return "", []
        shards = list(entry.on_remote)
        entry.on_remote.clear()
        return entry.fingerprint, shards

    def remember_why_gone(self, key: ChunkKey, reason: UnavailableReason) -> None:
        """Why the chunk cannot be served, until it can be again or `REASONS_KEPT` others went after it."""
        with self._lock:
            if not self.tiers(key):
                self._keep_reason(key, reason)

    def why_gone(self, key: ChunkKey) -> UnavailableReason:
        """`evicted`, what was wrong with its file, or `missing` when it never was here or that is forgotten."""
        with self._lock:
            return self._reasons_gone.get(key, UnavailableReason.MISSING)

    def _in_memory(self, key: ChunkKey) -> dict[Tier, int]:
        held: dict[Tier, int] = {}
        for tier, memory in self._memory.items():
            nbytes = memory.nbytes_of(key)
            if nbytes is not None:
                held[tier] = nbytes
        return held

    def _why_none(
        self, candidates: Sequence[ChunkIdentity], fingerprint: str, token_ids: Sequence[int]
    ) -> UnavailableReason:
        entries = [self._index.get(identity.key) for identity in candidates]
        if any(
            shard.size != self._shard.size for entry in entries if entry for shard in (*entry.on_disk, *entry.on_remote)
        ):
            return UnavailableReason.TP_LAYOUT
        for identity in candidates:
            reason = self.why_gone(identity.key)
            if reason not in (UnavailableReason.EVICTED, UnavailableReason.MISSING):
                return reason
        same_text = [entry for entry in self._index.with_content(content_digest(token_ids)) if self.tiers(entry.key)]
        if any(entry.fingerprint == fingerprint for entry in same_text):
            return UnavailableReason.PREFIX_CHANGED
        return UnavailableReason.OTHER_MODEL if same_text else UnavailableReason.MISSING

    def _tell(self, entry: IndexEntry, before: dict[Tier, int], after: dict[Tier, int]) -> None:
        for tier, nbytes in after.items():
            if tier not in before:
                self._events.queue(Published(entry.key, tier, nbytes, entry.tokens))
        for tier, nbytes in before.items():
            if tier not in after:
                self._events.queue(Evicted(entry.key, tier, nbytes))
        if after:
            self._reasons_gone.pop(entry.key, None)
        elif before:
            self._keep_reason(entry.key, UnavailableReason.EVICTED)

    def _keep_reason(self, key: ChunkKey, reason: UnavailableReason) -> None:
        self._reasons_gone[key] = reason
        self._reasons_gone.move_to_end(key)
        if len(self._reasons_gone) > REASONS_KEPT:
            self._reasons_gone.popitem(last=False)
