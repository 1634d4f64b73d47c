"""What a chunk is: its content, never its position.

A chunk key is the SHA-256, in hex, of this byte string (all integers little-endian):

    b"cacheblend chunk key"      20 bytes
    format version               u32
    fingerprint                  u64 length in bytes, then UTF-8
    prefix ids                   u64 count, then one i64 each
    token ids                    u64 count, then one i64 each

Every part carries its length, so no two identities share an encoding.
"""

from __future__ import annotations

import hashlib
import operator
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NewType

from kvstore.errors import StoreError

FORMAT_VERSION = 1

ChunkKey = NewType("ChunkKey", str)

_MAGIC = b"cacheblend chunk key"
_FINGERPRINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FIRST_SIGN_BYTE = 15
"""Of encoded ids: behind the count, the last byte of the first one."""


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """Everything a chunk key stands for.

    Attributes:
        fingerprint: of the model; letters, digits, `.`, `_`, `-`.
        prefix_ids: token ids the chunk was encoded behind; may be empty.
        token_ids: the chunk's own token ids, at least one.
        key: derived from the three, the same in every process and on every run.

    Raises:
        StoreError: no token ids, a token id that is not an integer from 0 to 2**63 - 1, or a fingerprint that
            could not name a folder.
    """

    fingerprint: str
    prefix_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    key: ChunkKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            raise StoreError(
                f"The model fingerprint {self.fingerprint!r} is not usable as a name; "
                "give letters, digits, '.', '_' or '-'."
            )
        prefix_ids, encoded_prefix = _checked_prefix(self.prefix_ids)
        token_ids, encoded_chunk = _checked_ids(self.token_ids, "chunk")
        if not token_ids:
            raise StoreError("A chunk of 0 tokens has no KV to store; leave empty chunks out.")
        object.__setattr__(self, "prefix_ids", prefix_ids)
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "key", _key_of(self.fingerprint, encoded_prefix, encoded_chunk))

    @property
    def base_position(self) -> int:
        """Position of the chunk's first token when it was encoded: the length of its prefix."""
        return len(self.prefix_ids)


@dataclass(frozen=True, slots=True, order=True)
class ShardLayout:
    """Which tensor-parallel rank's part of a chunk, out of how many.

    Raises:
        StoreError: the rank is outside 0 to size - 1.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise StoreError(f"Shard rank {self.rank} of {self.size} does not exist; ranks go from 0 to size - 1.")

    def all_ranks(self) -> list[ShardLayout]:
        """The layouts of every rank of this size, in order."""
        return [ShardLayout(rank, self.size) for rank in range(self.size)]


def content_digest(token_ids: Sequence[int]) -> bytes:
    """32-byte digest of the token ids alone, whatever the model and the prefix."""
    return hashlib.sha256(_encoded_ids(token_ids)).digest()


def _key_of(fingerprint: str, encoded_prefix: bytes, encoded_chunk: bytes) -> ChunkKey:
    name = fingerprint.encode()
    digest = hashlib.sha256(_MAGIC)
    digest.update(struct.pack("<IQ", FORMAT_VERSION, len(name)))
    digest.update(name)
    digest.update(encoded_prefix)
    digest.update(encoded_chunk)
    return ChunkKey(digest.hexdigest())


def _encoded_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<Q{len(ids)}q", len(ids), *ids)


def _checked_prefix(ids: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    """`_checked_ids` of a prefix, remembered: the chunks of a corpus share one, and it may be longer than they are."""
    given = tuple(ids)
    # What is no integer may have no hash, or be taken for an equal integer that is remembered.
    return _remembered_prefix(given) if set(map(type, given)) <= {int} else _checked_ids(given, "prefix")


@lru_cache(maxsize=256)
def _remembered_prefix(ids: tuple[int, ...]) -> tuple[tuple[int, ...], bytes]:
    return _checked_ids(ids, "prefix")


def _checked_ids(ids: Sequence[int], what: str) -> tuple[tuple[int, ...], bytes]:
    """The ids as plain integers, and encoded."""
    try:
        plain = tuple(map(operator.index, ids))
    except TypeError as error:
        raise StoreError(f"The {what}'s token ids must be integers: {error}.") from error
    try:
        encoded = _encoded_ids(plain)
    except struct.error:
        encoded = None
    # Every request hashes all its chunks, and looking at the encoding's sign bits costs a tenth of `min` and `max`.
    if encoded is None or not encoded[_FIRST_SIGN_BYTE::8].isascii():
        raise StoreError(f"The {what}'s token ids go from {min(plain)} to {max(plain)}; give ids from 0 to 2**63 - 1.")
    return plain, encoded
