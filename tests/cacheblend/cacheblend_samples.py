"""Chunks, plans and tiny KV for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.selectors import Candidates, Selector, make_selector
from kvstore.chunk import ChunkKV
from kvstore.key import ChunkIdentity

MODEL = "model"
BYTES_PER_TOKEN = 2 * 2 * 4
"""Of `tiny_kv`: one layer, K and V, one head of two float32 elements."""


def identity_of(seed: int, tokens: int = 4, prefix: tuple[int, ...] = (), model: str = MODEL) -> ChunkIdentity:
    return ChunkIdentity(model, prefix, tuple(range(seed * 1000, seed * 1000 + tokens)))


def tiny_kv(identity: ChunkIdentity) -> ChunkKV:
    """KV of the right shape and no meaning: `BYTES_PER_TOKEN` a token."""
    return ChunkKV(identity, torch.full((1, 2, len(identity.token_ids), 1, 2), float(identity.token_ids[0])))


def plan_of(
    chunks: Sequence[ChunkIdentity],
    selector: Selector | None = None,
    question: Sequence[int] = (7, 8, 9),
    system: Sequence[int] = (),
) -> BlendPlan:
    """A prompt that reuses all of `chunks`."""
    head = [Segment(SegmentRole.SYSTEM, tuple(system))] if system else []
    parts = [Segment(SegmentRole.CHUNK, chunk.token_ids, chunk) for chunk in chunks]
    return BlendPlan((*head, *parts, Segment(SegmentRole.QUESTION, tuple(question))), selector or make_selector("none"))


def candidates_of(lengths: Sequence[int], scores: Sequence[float] | None = None, start: int = 0) -> Candidates:
    """The rows of chunks of these lengths, side by side from position `start`."""
    total = sum(lengths)
    return Candidates(
        positions=torch.arange(start, start + total),
        offsets=torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths)]),
        chunk_lengths=torch.cat([torch.arange(0), *(torch.full((n,), n) for n in lengths)]),
        total=total,
        scores=None if scores is None else torch.tensor(list(scores), dtype=torch.float32),
    )
