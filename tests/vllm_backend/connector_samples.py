"""Chunks, plans and store folders for the quick tests of the connector's parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.selectors import Selector
from kvstore.chunk import ChunkKV
from kvstore.key import ChunkIdentity, ShardLayout
from kvstore.store import ChunkStore

MODEL = "model"


def ids_of(seed: int, tokens: int = 4) -> tuple[int, ...]:
    """Ids that no other seed has."""
    return tuple(range(seed * 1000, seed * 1000 + tokens))


def identity_of(seed: int, tokens: int = 4, prefix: Sequence[int] = (), model: str = MODEL) -> ChunkIdentity:
    return ChunkIdentity(model, tuple(prefix), ids_of(seed, tokens))


def plan_of(
    parts: Iterable[ChunkIdentity | Sequence[int]], selector: Selector | None, question: Sequence[int] = (7, 8, 9)
) -> BlendPlan:
    """A prompt of chunks (reused if an identity, fresh if bare ids) and `question`."""
    segments = [
        Segment(SegmentRole.CHUNK, part.token_ids, part)
        if isinstance(part, ChunkIdentity)
        else Segment(SegmentRole.CHUNK, tuple(part))
        for part in parts
    ]
    return BlendPlan((*segments, Segment(SegmentRole.QUESTION, tuple(question))), selector)


def put(root: Path, identity: ChunkIdentity, ranks: int = 1) -> None:
    """What another process of `ranks` workers does when it has collected a chunk."""
    for shard in ShardLayout(0, ranks).all_ranks():
        store = ChunkStore(root, 0, shard=shard)
        store.put(ChunkKV(identity, torch.ones(1, 2, len(identity.token_ids), 1, 2), shard))
        store.close()
