"""Chunks whose content follows from their token ids, so that any process can tell whether one is right."""

from __future__ import annotations

import torch

from kvstore.chunk import ChunkKV
from kvstore.key import ChunkIdentity, ShardLayout

FINGERPRINT = "0123456789abcdef0123456789abcdef"
ONE_RANK = ShardLayout()


def identity_of(seed: int, tokens: int = 4, prefix: tuple[int, ...] = (1,), model: str = FINGERPRINT):
    return ChunkIdentity(model, prefix, tuple(range(seed, seed + tokens)))


def chunk_of(
    identity: ChunkIdentity,
    shard: ShardLayout = ONE_RANK,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    heads: int = 2,
    dim: int = 4,
) -> ChunkKV:
    generator = torch.Generator().manual_seed(identity.token_ids[0] * 1000 + shard.rank)
    kv = torch.randn(layers, 2, len(identity.token_ids), heads, dim, generator=generator)
    return ChunkKV(identity, kv.to(dtype), shard)


def sample(seed: int, **of_the_identity) -> ChunkKV:
    return chunk_of(identity_of(seed, **of_the_identity))


def same(left: ChunkKV, right: ChunkKV) -> bool:
    return (
        left.identity == right.identity
        and left.shard == right.shard
        and left.kv.dtype == right.kv.dtype
        and torch.equal(left.kv, right.kv)
    )


def reserve(tier, chunk: ChunkKV) -> torch.Tensor:
    return tier.reserve(chunk.identity.key, chunk.kv.shape, chunk.kv.dtype)


def reserve_and_fill(tier, chunk: ChunkKV) -> ChunkKV:
    """The chunk in the room reserved for it, ready for `commit`."""
    return ChunkKV(chunk.identity, reserve(tier, chunk).copy_(chunk.kv), chunk.shard)
