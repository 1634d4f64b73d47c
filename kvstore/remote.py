"""The remote tier: chunks on a Redis or Valkey server, which any number of machines fill and read at once.

Every shard of a chunk is one hash:

    cacheblend:1:<first 16 characters of the fingerprint>:<chunk key>:<rank>of<size>
        head            JSON: `write`, a name for this writing; `parts`, their number; `stored`, bytes of all
                        parts together; `nbytes`, bytes of the KV
        <write>:<i>     part i of the value, 2 MiB, the last may be shorter

The value is exactly what a chunk file holds (`kvstore.format`) and is verified as a file is. "1" is the
version of this layout.

A hash is written under a name of its own, `<the same>:draft:<write>`, and renamed when it is whole: a chunk
that is half written is never seen, and readers of the one it replaces notice that the name of the writing
changed and begin again. What a killed writer leaves expires. How long chunks stay is the server's business
(`maxmemory-policy`); it drops a shard as a whole, since that is one hash.

Importing this module does not need the package `redis`; making a `RemoteTier` does.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvstore.chunk import ChunkKV
from kvstore.errors import ChunkUnavailable, StoreError, UnavailableReason
from kvstore.format import Allocate, chunk_bytes, parse_chunk
from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout

if TYPE_CHECKING:
    from kvstore.redis_link import Conversation, RedisLink

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
PART_BYTES = 2 << 20
PARTS_A_TRIP = 4
DRAFT_LIFE_S = 600
"""Far longer than one round trip may take, after each of which it begins again."""


@dataclass(frozen=True, slots=True)
class _Head:
    write: str
    parts: int
    stored: int
    nbytes: int


class RemoteTier:
    """Chunks on a Redis or Valkey server. Thread-safe and process-safe: all state is on the server.

    Connects when first used, and again after failures. A server that is silent for `timeout_s`, or that would
    take longer than `timeout_s` and a second for every 8 MiB, is unreachable: that call fails, and for a while,
    1 s at first and 30 s at most, all others do at once.

    Args:
        url: `redis://[user:password@]host:port/database`, `rediss://` for TLS, or `unix:///path`. It may carry
            the official client's own options.
        timeout_s: seconds.

    Attributes:
        name: the URL without user, password and options, for people.

    Raises:
        StoreError: the URL cannot be right, or the package `redis` is not installed. A server that is not there
            is no error.
    """

    def __init__(self, url: str, *, timeout_s: float = 2.0):
        self._link = _linked(url, timeout_s)
        self.name = self._link.name

    def put(self, chunk: ChunkKV) -> None:
        """Store a chunk's shard, replacing one that is there.

        Raises:
            ChunkUnavailable: `disk_full` when the server's memory is, `unwritable` when it refuses for another
                reason, `unreachable`. The chunk is then not there, or what was there before is.
        """
        key = chunk.identity.key
        value = memoryview(chunk_bytes(chunk))
        parts = -(-len(value) // PART_BYTES)
        head = _Head(uuid.uuid4().hex, parts, len(value), chunk.nbytes)
        place = _place(key, chunk.identity.fingerprint, chunk.shard)
        draft = f"{place}:draft:{head.write}"
        undo = [("UNLINK", draft)]
        with self._link.conversation(key, UnavailableReason.UNWRITABLE, undo) as talk:
            talk.will_move(len(value))
            if not _write(talk, draft, head, value):
                detail = f"{self.name} dropped the first parts before it had the last"
                raise ChunkUnavailable(key, UnavailableReason.DISK_FULL, detail)
            talk.round_trip([("PERSIST", draft), ("RENAME", draft, place)], transaction=True)

    def read(self, identity: ChunkIdentity, shard: ShardLayout, allocate: Allocate | None = None) -> ChunkKV:
        """Read one shard of a complete chunk, verified.

        Args:
            identity: of the chunk.
            shard: which shard of it.
            allocate: gives the memory for the KV; see `kvstore.format`.

        Raises:
            ChunkUnavailable: every reason of `parse_chunk`; also `missing` when a rank has no shard there,
                `truncated` when parts are missing, `unreadable` when what is there is no chunk or the server
                refuses, `unreachable`.
            StoreError: `allocate` gave memory that does not fit.
            Exception: whatever `allocate` raises.
        """
        place = _place(identity.key, identity.fingerprint, shard)
        with self._link.conversation(identity.key, UnavailableReason.UNREADABLE) as talk:
            head = self._complete(talk, identity, shard)
            while (value := _value(talk, place, head)) is None:
                newer = self._complete(talk, identity, shard)
                if newer == head:
                    raise self._damaged(identity.key, UnavailableReason.TRUNCATED, "parts of it are missing")
                head = newer
        try:
            return parse_chunk(value, identity, shard, allocate)
        except ChunkUnavailable as error:
            raise ChunkUnavailable(error.key, error.reason, f"{self.name}, {error.detail}", error.damaged) from error

    def holds(self, identity: ChunkIdentity, shard: ShardLayout) -> int | None:
        """Bytes of KV of one shard of a complete chunk, None if not all ranks are there; one round trip, and
        nothing is verified.

        Raises:
            ChunkUnavailable: `unreadable`, `unreachable`.
        """
        with self._link.conversation(identity.key, UnavailableReason.UNREADABLE) as talk:
            try:
                return self._complete(talk, identity, shard).nbytes
            except ChunkUnavailable as error:
                if error.reason is UnavailableReason.MISSING:
                    return None
                raise

    def delete(self, key: ChunkKey, fingerprint: str, shards: Iterable[ShardLayout]) -> int:
        """Remove these shards of a chunk: stored bytes freed, 0 if none was there or can be removed; that they
        cannot is logged.
        """
        places = [_place(key, fingerprint, shard) for shard in shards]
        if not places:
            return 0
        asked = [("HGET", place, "head") for place in places]
        try:
            with self._link.conversation(key, UnavailableReason.UNWRITABLE) as talk:
                replies = talk.round_trip([*asked, ("UNLINK", *places)], transaction=True)
        except ChunkUnavailable as error:
            logger.warning("not removed from the remote tier: %s", error)
            return 0
        heads = [_parse_head(text) for text in replies[:-1] if text is not None]
        return sum(head.stored for head in heads if head is not None)

    def close(self) -> None:
        """Close the connections."""
        self._link.close()

    def _complete(self, talk: Conversation, identity: ChunkIdentity, shard: ShardLayout) -> _Head:
        """The head of one shard, when every rank's is there."""
        ranks = shard.all_ranks()
        places = [_place(identity.key, identity.fingerprint, rank) for rank in ranks]
        texts = talk.round_trip([("HGET", place, "head") for place in places])
        absent = [rank.rank for rank, text in zip(ranks, texts, strict=True) if text is None]
        if absent:
            detail = f"rank {absent[0]} of {shard.size} is not on {self.name}"
            raise ChunkUnavailable(identity.key, UnavailableReason.MISSING, detail)
        head = _parse_head(texts[shard.rank])
        if head is None:
            raise self._damaged(identity.key, UnavailableReason.UNREADABLE, "its head makes no sense")
        return head

    def _damaged(self, key: ChunkKey, reason: UnavailableReason, detail: str) -> ChunkUnavailable:
        return ChunkUnavailable(key, reason, f"{self.name}, what was stored: {detail}", damaged=True)


def _linked(url: str, timeout_s: float) -> RedisLink:
    try:
        from kvstore.redis_link import RedisLink
    except ImportError as error:
        raise StoreError(
            "A remote tier needs the package redis, which is not installed; pip install 'cacheblend-rag[remote]'."
        ) from error
    return RedisLink(url, timeout_s)


def _place(key: ChunkKey, fingerprint: str, shard: ShardLayout) -> str:
    return f"cacheblend:{LAYOUT_VERSION}:{fingerprint[:16]}:{key}:{shard.rank}of{shard.size}"


def _write(talk: Conversation, draft: str, head: _Head, value: memoryview) -> bool:
    """Write a hash whole: False when the server dropped it in between."""
    for first in range(0, head.parts, PARTS_A_TRIP):
        numbers = range(first, min(first + PARTS_A_TRIP, head.parts))
        fields = {f"{head.write}:{i}": value[i * PART_BYTES : (i + 1) * PART_BYTES] for i in numbers}
        if numbers.stop == head.parts:
            fields["head"] = memoryview(json.dumps(asdict(head)).encode())
        flat = [item for field in fields.items() for item in field]
        commands = [("HSET", draft, *flat), ("EXPIRE", draft, DRAFT_LIFE_S), ("HLEN", draft)]
        length = talk.round_trip(commands, transaction=True)[-1]
    return length == head.parts + 1


def _value(talk: Conversation, place: str, head: _Head) -> bytearray | None:
    """All parts in one; None when one is missing."""
    talk.will_move(head.stored)
    value = bytearray()
    for first in range(0, head.parts, PARTS_A_TRIP):
        names = [f"{head.write}:{i}" for i in range(first, min(first + PARTS_A_TRIP, head.parts))]
        (parts,) = talk.round_trip([("HMGET", place, *names)])
        for part in parts:
            if part is None:
                return None
            value += part
    return value


def _parse_head(text: bytes) -> _Head | None:
    try:
        head = _Head(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = (head.parts, head.stored, head.nbytes)
    right = isinstance(head.write, str) and all(type(number) is int and number > 0 for number in numbers)
    return head if right else None
