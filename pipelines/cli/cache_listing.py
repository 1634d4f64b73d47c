"""What a cache folder holds, by the headers of its files."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import ChunkUnavailable

if TYPE_CHECKING:
    from kvstore.disk import DiskTier
    from kvstore.files import ShardFile
    from kvstore.format import ChunkHeader


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """A chunk on disk: `nbytes` of all its shards' files, `last_used` in seconds since the epoch."""

    key: str
    fingerprint: str
    prefix_ids: tuple[int, ...]
    dtype: str
    tokens: int
    shards: int
    nbytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class CachedGroup:
    """The chunks of one model that were encoded behind one prefix."""

    fingerprint: str
    dtype: str
    prefix_tokens: int
    chunks: int
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All that a cache folder holds; `unreadable` counts files without a sound header."""

    chunks: tuple[CachedChunk, ...]
    unreadable: int
    quarantined_bytes: int

    def groups(self) -> list[CachedGroup]:
        """The chunks counted by model and prefix."""
        members: dict[tuple[str, str, tuple[int, ...]], list[CachedChunk]] = defaultdict(list)
        for chunk in self.chunks:
            members[chunk.fingerprint, chunk.dtype, chunk.prefix_ids].append(chunk)
        return [
            CachedGroup(
                fingerprint,
                dtype,
                len(prefix_ids),
                len(chunks),
                sum(chunk.tokens for chunk in chunks),
                sum(chunk.nbytes for chunk in chunks),
            )
            for (fingerprint, dtype, prefix_ids), chunks in members.items()
        ]

    def to_dict(self, with_chunks: bool) -> dict[str, Any]:
        """A JSON-ready form."""
        account: dict[str, Any] = {
            "groups": [asdict(group) for group in self.groups()],
            "chunks": len(self.chunks),
            "tokens": sum(chunk.tokens for chunk in self.chunks),
            "bytes": sum(chunk.nbytes for chunk in self.chunks),
            "unreadable": self.unreadable,
            "quarantined_bytes": self.quarantined_bytes,
        }
        if with_chunks:
            account["each"] = [asdict(chunk) for chunk in self.chunks]
        return account


def list_chunks(tier: DiskTier) -> Listing:
    """Read the header of every file of the tier; the tensors are not read."""
    shards: dict[str, list[tuple[ShardFile, ChunkHeader]]] = defaultdict(list)
    unreadable = 0
    for file in tier.files():
        try:
            header = tier.header_of(file)
        except ChunkUnavailable:
            unreadable += 1
        else:
            shards[file.key].append((file, header))
    chunks = tuple(_chunk(found) for found in shards.values())
    return Listing(chunks, unreadable, sum(path.stat().st_size for path in tier.quarantined()))


def _chunk(shards: list[tuple[ShardFile, ChunkHeader]]) -> CachedChunk:
    header = shards[0][1]
    return CachedChunk(
        key=header.identity.key,
        fingerprint=header.identity.fingerprint,
        prefix_ids=header.identity.prefix_ids,
        dtype=header.dtype,
        tokens=len(header.identity.token_ids),
        shards=len(shards),
        nbytes=sum(file.nbytes for file, _ in shards),
        last_used=max(file.last_used for file, _ in shards),
    )
