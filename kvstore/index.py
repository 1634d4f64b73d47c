"""What is known of the cold tiers: chunks by key and by content. Imports no torch. Not thread-safe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout, content_digest


@dataclass(slots=True)
class IndexEntry:
    """One chunk: whose it is, how many rows it has, and the KV bytes of every shard on disk and on the remote.

    The remote counts a shard only once every rank's is there.
    """

    key: ChunkKey
    fingerprint: str
    content: bytes
    tokens: int
    on_disk: dict[ShardLayout, int] = field(default_factory=dict)
    on_remote: dict[ShardLayout, int] = field(default_factory=dict)

    def complete_on_disk(self, size: int) -> bool:
        """Whether every rank of this tensor-parallel size has its shard on disk."""
        return sum(shard.size == size for shard in self.on_disk) == size


class ChunkIndex:
    """Chunks that are in any tier, without their token ids."""

    def __init__(self) -> None:
        self._entries: dict[ChunkKey, IndexEntry] = {}
        self._by_content: defaultdict[bytes, set[ChunkKey]] = defaultdict(set)

    def __iter__(self) -> Iterator[IndexEntry]:
        return iter(list(self._entries.values()))

    def get(self, key: ChunkKey) -> IndexEntry | None:
        """The chunk's entry, None if it is not known."""
        return self._entries.get(key)

    def entry_for(self, identity: ChunkIdentity) -> IndexEntry:
        """The chunk's entry, made if it was not known."""
        entry = self._entries.get(identity.key)
        if entry is None:
            content = content_digest(identity.token_ids)
            entry = IndexEntry(identity.key, identity.fingerprint, content, len(identity.token_ids))
            self._entries[entry.key] = entry
            self._by_content[content].add(entry.key)
        return entry

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk; nothing happens if it is not known."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            same = self._by_content[entry.content]
            same.discard(key)
            if not same:
                del self._by_content[entry.content]

    def with_content(self, content: bytes) -> list[IndexEntry]:
        """Every chunk of these very token ids, whatever the model and the prefix."""
        return [self._entries[key] for key in self._by_content.get(content, ())]
