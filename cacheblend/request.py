"""A request to the engine, and what became of it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import BlendReport, FinishReason, PrefillHints
from cacheblend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A question with its plan.

    Attributes:
        request_id: the caller's name for it, unique while the engine knows it.
        plan: the prompt; its reused segments name published chunks.
        policy: full, blend or auto.
        sampling: decoding parameters.
        hints: for the predictor.
    """

    request_id: str
    plan: BlendPlan
    policy: Policy = Policy.BLEND
    sampling: SamplingParams = field(default_factory=SamplingParams)
    hints: PrefillHints = field(default_factory=PrefillHints)


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of a finished request.

    Attributes:
        request_id: which one.
        token_ids: the answer's ids.
        finish_reason: why it ended.
        ttft_ms: from submission to the first token, queueing, scheduling and transfer included; None without one.
        tpot_ms: mean time from one token to the next after the first; None with fewer than two.
        queue_ms: from submission to the step that prefilled it.
        report: what its prefill did, with bytes counted by the tier they were in when it was submitted.
        error: what the runner refused it with, if `finish_reason` is ERROR; None otherwise.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    ttft_ms: float | None
    tpot_ms: float | None
    queue_ms: float
    report: BlendReport
    error: BlendError | None = None


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What one step of the engine brought.

    Attributes:
        step_id: the runner's step, or None if nothing ran.
        tokens: new ids by request.
        finished: outcomes of requests that ended with this step.
    """

    step_id: int | None
    tokens: dict[str, tuple[int, ...]]
    finished: tuple[RequestOutcome, ...]
