"""What the scheduler's half knows of each request that asked for something."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import BlendReport
from cacheblend.reports import bytes_by_first_tier
from cacheblend.selectors.base import Evidence
from cacheblend.selectors.given import LayerRows
from cacheblend.vllm_backend.messages import Collected
from cacheblend.vllm_backend.namespaces import Namespace
from kvstore.key import ChunkIdentity, ChunkKey


class Phase(StrEnum):
    """How far a request is."""

    PLANNED = "planned"
    ADMITTED = "admitted"
    BLENDING = "blending"
    BLENDED = "blended"
    PLAIN = "plain"


@dataclass
class Tracked:
    """A request with a plan.

    Attributes:
        request: vLLM's own.
        own_salt: the cache salt it came with.
        policy: full, blend or auto.
        asked: what it asked for, with the chunks that were published when it came; None if it cannot be planned.
        plan: the effective plan once it is admitted.
        reason: why the whole prompt is prefilled although blending was asked for.
        phase: how far it is.
        waiting_for: chunks on their way to host memory.
        loaded_bytes: bytes that came for it, by the tier they came from.
        namespace: where its blended blocks belong.
        start: rows found in the prefix cache.
        report: what its blend did.
        layer_rows: the rows it recomputed, for a blend after a preemption.
    """

    request: Any
    own_salt: str | None
    policy: Policy
    asked: BlendPlan | None
    plan: BlendPlan | None = None
    reason: str | None = None
    phase: Phase = Phase.PLANNED
    waiting_for: set[ChunkKey] = field(default_factory=set)
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    namespace: Namespace | None = None
    start: int = 0
    report: BlendReport | None = None
    layer_rows: LayerRows | None = None

    @property
    def id(self) -> str:
        """vLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def first_reused(self) -> int:
        """Position of the first reused row."""
        assert self.plan is not None
        return self.plan.reused[0].start

    @property
    def end(self) -> int:
        """Rows before it are filled by the blend; the last one of the prompt never is.

        A selector that asks the question needs the pages of everything before it; others end with the last chunk.
        """
        assert self.plan is not None
        selector = self.plan.selector
        asks = selector is not None and selector.needs(Evidence.ATTENTION)
        end = self.plan.question.start if asks else self.plan.reused[-1].end
        return min(end, self.request.num_tokens - 1)

    def account(self) -> BlendReport:
        """What became of the prompt, so far as it is known."""
        report = replace(self.report) if self.report is not None else BlendReport()
        report.bytes_loaded = bytes_by_first_tier(report.bytes_loaded, self.loaded_bytes)
        plan = self.plan or self.asked
        # One for each chunk: how many there were is part of the account.
        reasons = list(plan.fallback_reasons if plan is not None else ())
        if self.reason is not None and self.reason not in reasons:
            reasons.append(self.reason)
        report.fallback_reasons = tuple(reasons)
        return report


@dataclass
class Collecting:
    """A request that collects a chunk.

    Attributes:
        request: vLLM's own.
        identity: the chunk.
        block_ids: its pages so far.
        ordered: whether the workers were told to take it.
        result: what all ranks made of it.
    """

    request: Any
    identity: ChunkIdentity
    block_ids: list[int] = field(default_factory=list)
    ordered: bool = False
    result: Collected | None = None
