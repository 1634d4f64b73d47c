"""The classes that carry the run time, as interfaces. Imports no torch.

Four parts, none reaching into another's state. The scheduler decides, the prefetcher moves bytes, the predictor
gives advice that may be ignored, the runner runs the model and nothing else. `cacheblend.engine.BlendEngine` is the
only place that knows all four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cacheblend.plan import BlendPlan, Policy
from cacheblend.sampling_params import SamplingParams
from kvstore.events import StoreEvent
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import Tier
from kvstore.transfer import AsyncPrefetcher, TransferOrder

if TYPE_CHECKING:
    from cacheblend.metadata import CacheFuseMetadata
    from cacheblend.scheduling.cost_model import CostModel

__all__ = [
    "Admission",
    "Advice",
    "AsyncPrefetcher",
    "BlendReport",
    "CandidatesSeen",
    "Eviction",
    "FinishReason",
    "KVCacheScheduler",
    "ModelRunner",
    "PrefillHints",
    "QuestionFinished",
    "QuestionQueued",
    "QuestionStarted",
    "SchedulerStep",
    "SpeculativePredictor",
    "StepOutput",
    "TokensGenerated",
    "TransferOrder",
]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced.

    Attributes:
        step_id: counts steps from 1; residency and token logs carry the same ids.
        tokens: new ids by sequence: exactly one for each decoding sequence (one to k + 1 under speculation), none
            while it waits or prefills. A sequence whose prefill ends in this step decodes from this step on.
        finished: sequences that ended with this step, and why.
    """

    step_id: int
    tokens: Mapping[str, tuple[int, ...]]
    finished: Mapping[str, FinishReason]


@dataclass
class BlendReport:
    """What the prefill of one prompt did.

    Attributes:
        mode: "full" or "blend", as it happened.
        selector: the selector's `spec`, or None for a full prefill.
        reused_tokens: reusable rows taken from stored KV, recomputed ones included.
        recomputed_tokens: of these, the rows recomputed (those of the last layer).
        recomputed_ratio: recomputed over reusable rows, averaged over layers where row sets differ.
        rows: positions recomputed in the last layer, ascending, fresh rows excluded.
        bytes_loaded: bytes of stored KV read, by tier.
        parts_ms: wall time by part (load, relocate, score, recompute, question), shared by a batch.
        fallback_reasons: why chunks that were asked for as reusable are fresh.
    """

    mode: str = "full"
    selector: str | None = None
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    recomputed_ratio: float = 0.0
    rows: tuple[int, ...] = ()
    bytes_loaded: dict[str, int] = field(default_factory=dict)
    parts_ms: dict[str, float] = field(default_factory=dict)
    fallback_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillHints:
    """What helps to guess which chunks will be wanted next; no answer depends on it.

    Attributes:
        session_id: the conversation a prompt belongs to, None outside of one.
        candidates: chunks the retriever nearly picked, best first.
    """

    session_id: str | None = None
    candidates: tuple[ChunkIdentity, ...] = ()


class ModelRunner(Protocol):
    """Runs the model and nothing else. Not thread-safe: one thread drives it."""

    @property
    def fingerprint(self) -> str:
        """What the model's chunk keys are derived from."""
        ...

    @property
    def max_model_len(self) -> int:
        """Rows a sequence can have, prompt and answer together."""
        ...

    @property
    def cache_fuse_metadata(self) -> CacheFuseMetadata:
        """CacheBlend's switches; they rule prompts given as bare token ids."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV one row takes."""
        ...

    @property
    def schedules_kv(self) -> bool:
        """Whether it finds, loads and evicts chunk KV itself, so that no scheduler has to decide for it."""
        ...

    def collect(self, chunks: Sequence[Sequence[int]], prefix: Sequence[int]) -> list[ChunkKey]:
        """Prefill chunks behind `prefix` and put their KV into the store; those already there are skipped.

        Returns:
            One key a chunk, in order.

        Raises:
            BlendError: for an empty chunk or one that does not fit the model's context behind the prefix.
        """
        ...

    def prefill(
        self,
        prompt: BlendPlan | Sequence[int],
        sampling: SamplingParams,
        sequence_id: str | None = None,
        policy: Policy = Policy.BLEND,
        hints: PrefillHints | None = None,
    ) -> str:
        """Queue a prompt; the next step prefills it.

        Args:
            prompt: a plan, or token ids, which follow `cache_fuse_metadata`.
            sampling: decoding parameters.
            sequence_id: a name for it; a new one by default.
            policy: how the plan is to be served by a runner that schedules for itself; for any other one a scheduler
                has applied it to the plan already.
            hints: for a runner that schedules for itself; others have no use for them.

        Returns:
            The sequence's id, `sequence_id` if given.

        Raises:
            BlendError: if the id is in use, prompt and answer do not fit the model's context, or the model cannot
                serve the prompt as it stands; nothing else is affected.
        """
        ...

    def step(self) -> StepOutput:
        """Prefill what waits and decode one token of everything that runs."""
        ...

    def report(self, sequence_id: str) -> BlendReport:
        """What the sequence's prefill did; known from the step that finished it.

        Raises:
            KeyError: for an unknown or released sequence.
        """
        ...

    def abort(self, sequence_id: str) -> None:
        """End a sequence now; unknown and finished ones are let be."""
        ...

    def release(self, sequence_id: str) -> None:
        """Forget a finished sequence and free its KV; unknown ones are let be."""
        ...

    def close(self) -> None:
        """Give back what it holds, processes included; nothing can be run afterwards. Closing again does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class QuestionQueued:
    """A question joined the queue: the chunks it reads, in the order of their use, and its conversation."""

    request_id: str
    chunks: tuple[ChunkIdentity, ...]
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class CandidatesSeen:
    """Retrieval candidates beyond the top-k of a question, best first."""

    request_id: str
    chunks: tuple[ChunkIdentity, ...]


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """A request's new token ids."""

    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuestionStarted:
    """A question's chunks are at hand and its prefill begins: they need not be brought any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class QuestionFinished:
    """A question left the queue: answered or aborted."""

    request_id: str


PredictorEvent = QuestionQueued | CandidatesSeen | QuestionStarted | TokensGenerated | QuestionFinished


@dataclass(frozen=True, slots=True)
class Advice:
    """A chunk that will probably be wanted.

    Attributes:
        chunk: which one.
        confidence: 0 to 1.
    """

    chunk: ChunkIdentity
    confidence: float


class SpeculativePredictor(Protocol):
    """Says which chunks will be wanted. Advice only: with it frozen or dead, tokens are the same, only later."""

    def observe(self, event: PredictorEvent) -> None:
        """Take note of an event; never blocks, may drop it."""
        ...

    def advice(self, limit: int) -> list[Advice]:
        """Advice that is new or has changed, most confident first, `limit` pieces at most; never blocks.

        Confidence 0 takes a piece back.
        """
        ...

    def close(self) -> None:
        """Give back what it holds, processes included. Closing again does nothing."""
        ...


class Eviction(NamedTuple):
    """A chunk that must leave a memory tier, and why. What it has in other tiers stays."""

    key: ChunkKey
    reason: str
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class Admission:
    """A scheduler's decision about one request, fixed when it is admitted.

    Evictions come first, then loads and promotions.

    Attributes:
        plan: the effective plan.
        loads: what is brought to host memory; the prefill waits for it.
        evictions: chunks that must leave first.
        reason: why the whole request is prefilled though blending was asked for; None otherwise.
        promotions: what is brought to the GPU; nobody waits for it.
    """

    plan: BlendPlan
    loads: tuple[TransferOrder, ...]
    evictions: tuple[Eviction, ...]
    reason: str | None = None
    promotions: tuple[TransferOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """What to move besides what requests need: chunks that must leave first, and chunks to promote on advice."""

    promotions: tuple[TransferOrder, ...] = ()
    evictions: tuple[Eviction, ...] = ()


class KVCacheScheduler(Protocol):
    """Decides what is promoted, evicted, loaded or recomputed, under byte budgets. Moves no bytes itself.

    Its catalogue of chunks follows the store's events. The work of a call is proportional to the chunks it names and
    the chunks it moves, times the logarithm of how many there are; never to the number of chunks, pins or loads.
    A decision counts from when it is made: what is to leave a tier is not there any more, and what is to come takes
    its room. Whoever carries decisions out keeps their order.
    """

    def on_event(self, event: StoreEvent) -> None:
        """Follow the store: a chunk was published in a tier, left it, or was quarantined."""
        ...

    def admit(self, request_id: str, plan: BlendPlan, policy: Policy) -> Admission:
        """Fix the effective plan of a request, pin the chunks it reads and say what must be loaded and evicted for it.

        Raises:
            BlendError: if the request was admitted before.
        """
        ...

    def on_unavailable(self, key: ChunkKey) -> None:
        """A load failed: the chunk is not published any more."""
        ...

    def on_not_loaded(self, key: ChunkKey, target: Tier = Tier.HOST) -> None:
        """A load to `target` ended without bringing the chunk although it is sound; its room is free again.

        It was given up, or the chunk was there already.
        """
        ...

    def release(self, request_id: str) -> None:
        """Drop a request's pins; unknown requests are let be."""
        ...

    def step(self, advice: Sequence[Advice]) -> SchedulerStep:
        """Turn advice into promotions that fit the budgets beside everything pinned.

        Advice holds until it is given again; with confidence 0 it is taken back. Also evicts what a smaller
        budget has no room for, as pins go.
        """
        ...

    def set_budget(self, tier: Tier, nbytes: int) -> tuple[Eviction, ...]:
        """Change the byte budget of a memory tier from now on.

        Returns:
            What must leave for it now. What is pinned or on its way leaves with later steps.

        Raises:
            BlendError: for a cold tier or a negative budget.
        """
        ...

    def calibrate(self, costs: CostModel) -> None:
        """Decide by measured costs from now on; what is in a memory tier already keeps the cost it came with."""
        ...

    def pinned(self) -> int:
        """Pins held by all requests together."""
        ...
