"""The scheduler's own picture of which chunks exist, where, and how large. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.events import Evicted, Published, StoreEvent
from kvstore.key import ChunkKey
from kvstore.tiers import ChunkRecord, Tier


@dataclass(slots=True)
class _Entry:
    nbytes: int
    tiers: set[Tier] = field(default_factory=set)


class Catalogue:
    """Follows a store's events; every call touches one chunk."""

    def __init__(self) -> None:
        self._entries: dict[ChunkKey, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def enter(self, record: ChunkRecord) -> None:
        """Take over a chunk that existed before the first event."""
        self._entries[record.key] = _Entry(record.nbytes, set(record.tiers))

    def follow(self, event: StoreEvent) -> None:
        """Apply an event."""
        if isinstance(event, Published):
            entry = self._entries.setdefault(event.key, _Entry(event.nbytes))
            entry.nbytes = event.nbytes
            entry.tiers.add(event.tier)
        elif isinstance(event, Evicted):
            entry = self._entries.get(event.key, _Entry(0))
            entry.tiers.discard(event.tier)
            if not entry.tiers:
                self._entries.pop(event.key, None)

    def forget(self, key: ChunkKey) -> None:
        """The chunk cannot be served any more."""
        self._entries.pop(key, None)

    def on_host(self, key: ChunkKey) -> bool:
        """Whether the chunk is in host memory."""
        return key in self._entries and Tier.HOST in self._entries[key].tiers

    def nbytes(self, key: ChunkKey) -> int:
        """Bytes of the chunk's KV; 0 for an unknown chunk."""
        return self._entries[key].nbytes if key in self._entries else 0
