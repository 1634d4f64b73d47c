"""The classes that carry the run time, as interfaces. Imports no torch.

Four parts, none reaching into another's state. The scheduler decides, the prefetcher moves bytes, the predictor
gives advice that may be ignored, the runner runs the model and nothing else. `cacheblend.engine.BlendEngine` is the
only place that knows all four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from cacheblend.plan import BlendPlan, Policy
from cacheblend.sampling_params import SamplingParams
from kvstore.events import StoreEvent
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.transfer import AsyncPrefetcher

if TYPE_CHECKING:
    from cacheblend.metadata import CacheFuseMetadata

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
    "QuestionFinished",
    "QuestionQueued",
    "QuestionStarted",
    "SchedulerStep",
    "SpeculativePredictor",
    "StepOutput",
    "TokensGenerated",
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
    ) -> str:
        """Queue a prompt; the next step prefills it.

        Args:
            prompt: a plan, or token ids, which follow `cache_fuse_metadata`.
            sampling: decoding parameters.
            sequence_id: a name for it; a new one by default.
            policy: how the plan is to be served by a runner that schedules for itself; for any other one a scheduler
                has applied it to the plan already.

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
    """A question joined the queue; its chunks in the order they will be used."""

    request_id: str
    chunks: tuple[ChunkIdentity, ...]


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
        """The newest advice, most confident first, `limit` pieces at most; never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Eviction:
    """A chunk that must leave host memory, and why."""

    key: ChunkKey
    reason: str


@dataclass(frozen=True, slots=True)
class Admission:
    """A scheduler's decision about one request, fixed when it is admitted.

    Attributes:
        plan: the effective plan.
        loads: chunks to be brought to host memory before the prefill.
        evictions: chunks that must leave first.
        reason: why the whole request is prefilled though blending was asked for; None otherwise.
    """

    plan: BlendPlan
    loads: tuple[ChunkIdentity, ...]
    evictions: tuple[Eviction, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """What to move besides what requests need: chunks to promote on advice, and to evict for them."""

    promotions: tuple[ChunkIdentity, ...] = ()
    evictions: tuple[Eviction, ...] = ()


class KVCacheScheduler(Protocol):
    """Decides what is promoted, evicted, loaded or recomputed, under byte budgets. Moves no bytes itself.

    Its catalogue of chunks follows the store's events. The work of a call is proportional to the chunks it names,
    never to the number of chunks in the catalogue.
    """

    def on_event(self, event: StoreEvent) -> None:
        """Follow the store: a chunk was published in a tier, left it, or was quarantined."""
        ...

    def admit(self, request_id: str, plan: BlendPlan, policy: Policy) -> Admission:
        """Fix the effective plan of a request, pin its chunks and say what must be loaded and evicted for it.

        Raises:
            BlendError: if the request was admitted before.
        """
        ...

    def on_unavailable(self, key: ChunkKey) -> None:
        """A load failed: the chunk is not published any more."""
        ...

    def on_not_loaded(self, key: ChunkKey) -> None:
        """A load was given up although the chunk is sound; its room is free again."""
        ...

    def release(self, request_id: str) -> None:
        """Drop a request's pins; unknown requests are let be."""
        ...

    def step(self, advice: Sequence[Advice]) -> SchedulerStep:
        """Turn advice into promotions that fit the budget beside everything pinned."""
        ...

    def pinned(self) -> int:
        """Pins held by all requests together."""
        ...
