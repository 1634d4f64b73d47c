"""What the tests of the remote tier share."""

from __future__ import annotations

import pytest
import torch
from kvstore_samples import ONE_RANK, identity_of

from kvstore import ChunkIdentity, ChunkKV, ChunkUnavailable, ShardLayout, UnavailableReason

PLENTY_S = 60.0
LARGE = 12 << 20
"""Bytes of a chunk that takes more than one round trip and more than the kernel buffers."""


def large(seed: int, value: float | None = None, nbytes: int = LARGE) -> ChunkKV:
    kv = torch.full((2, 2, 4, 1, nbytes // 64), float(seed if value is None else value))
    return ChunkKV(identity_of(seed), kv)


def key_of(identity: ChunkIdentity, shard: ShardLayout = ONE_RANK) -> str:
    return f"cacheblend:1:{identity.fingerprint[:16]}:{identity.key}:{shard.rank}of{shard.size}"


def failure(call, *arguments) -> ChunkUnavailable:
    with pytest.raises(ChunkUnavailable) as caught:
        call(*arguments)
    return caught.value


def reason_of(call, *arguments) -> UnavailableReason:
    return failure(call, *arguments).reason
