"""One request inside the reference runner: its plan, its KV, its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from cacheblend.plan import BlendPlan
from cacheblend.protocols import BlendReport
from cacheblend.sampling_params import SamplingParams
from kvstore.chunk import ChunkKV
from kvstore.key import ChunkKey


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass
class RunningSequence:
    """A prompt being served.

    Attributes:
        id: the caller's name for it.
        plan: the effective plan; chunks that fail to load become fresh in it.
        sampling: decoding parameters.
        forced: ids that follow the prompt by decree (teacher forcing), usually none.
        provided: chunks handed over with the request, looked up before the store.
        kv: [layers, 2, kv_heads, capacity, head_dim], allocated when the prompt is prefilled.
        generated: new ids so far.
        state: where it is in its life.
        report: what its prefill did.
    """

    id: str
    plan: BlendPlan
    sampling: SamplingParams
    forced: tuple[int, ...] = ()
    provided: dict[ChunkKey, ChunkKV] = field(default_factory=dict)
    kv: torch.Tensor | None = None
    generated: list[int] = field(default_factory=list)
    state: SequenceState = SequenceState.WAITING
    report: BlendReport = field(default_factory=BlendReport)

    def __len__(self) -> int:
        return self.plan.length + len(self.forced) + len(self.generated)

    @property
    def token_ids(self) -> list[int]:
        """Prompt, forced and generated ids in order."""
        return [*self.plan.token_ids, *self.forced, *self.generated]

    @property
    def capacity(self) -> int:
        """Rows the sequence can ever have."""
        return self.plan.length + len(self.forced) + self.sampling.max_tokens

    @property
    def tail_start(self) -> int:
        """First row of the last pass: the question's, or row 0 of a full prefill."""
        return self.plan.question.start if self.plan.reused else 0

    def keys(self, layer: int) -> torch.Tensor:
        """[kv_heads, capacity, head_dim] of `layer`, a view."""
        assert self.kv is not None
        return self.kv[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[kv_heads, capacity, head_dim] of `layer`, a view."""
        assert self.kv is not None
        return self.kv[layer, 1]
