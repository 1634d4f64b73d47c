"""What a question comes back with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cacheblend.request import RequestOutcome


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk the answer was given from.

    Attributes:
        document_id: of the document it belongs to.
        title: the document's title, may be empty.
        text: the chunk's text.
        score: the retriever's score (cosine similarity), or None for documents the caller gave.
    """

    document_id: str
    title: str
    text: str
    score: float | None


@dataclass(frozen=True, slots=True)
class AnswerMeta:
    """An honest account of one request.

    Attributes:
        ttft_ms: from handing the request over to the first token: retrieval and tokenisation excluded; the wait for
            the engine's thread, queueing, transfer and blending included.
        tpot_ms: mean time from token to token after the first; None for one token.
        retrieval_ms: time of the retriever; 0 for given documents.
        queue_ms: from handing the request over until the prefill began.
        engine: the engine that ran it.
        mode: "full" or "blend", as it happened.
        policy: what was asked for.
        selector: the selector and its parameters; None for a full prefill.
        prompt_tokens: rows of the prompt.
        reused_tokens: reusable rows taken from stored KV, recomputed ones included.
        recomputed_tokens: of these, rows recomputed.
        recomputed_ratio: recomputed over reusable rows, averaged over layers.
        bytes_loaded: bytes of stored KV read, by the tier they were in.
        parts_ms: the prefill's wall time by part, shared by requests prefilled together.
        fallback_reason: why chunks, or the whole prompt, were prefilled although blending was asked for; None if
            nothing was.
        fallback_reasons: the reason of each such chunk.
        finish_reason: why the answer ended.
        new_tokens: tokens of the answer.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    retrieval_ms: float
    queue_ms: float
    engine: str
    mode: str
    policy: str
    selector: str | None
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    recomputed_ratio: float
    bytes_loaded: dict[str, int]
    parts_ms: dict[str, float]
    fallback_reason: str | None
    fallback_reasons: tuple[str, ...]
    finish_reason: str
    new_tokens: int

    @classmethod
    def of(
        cls, outcome: RequestOutcome, *, engine: str, policy: str, prompt_tokens: int, retrieval_ms: float
    ) -> AnswerMeta:
        """The account of a finished request."""
        report = outcome.report
        reasons = report.fallback_reasons
        return cls(
            ttft_ms=outcome.ttft_ms,
            tpot_ms=outcome.tpot_ms,
            retrieval_ms=retrieval_ms,
            queue_ms=outcome.queue_ms,
            engine=engine,
            mode=report.mode,
            policy=policy,
            selector=report.selector,
            prompt_tokens=prompt_tokens,
            reused_tokens=report.reused_tokens,
            recomputed_tokens=report.recomputed_tokens,
            recomputed_ratio=report.recomputed_ratio,
            bytes_loaded=report.bytes_loaded,
            parts_ms=report.parts_ms,
            fallback_reason=", ".join(dict.fromkeys(reasons)) or None,
            fallback_reasons=reasons,
            finish_reason=outcome.finish_reason.value,
            new_tokens=len(outcome.token_ids),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its sources and its account."""

    question: str
    text: str
    sources: tuple[Source, ...]
    meta: AnswerMeta

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)
