"""How hits are counted, whatever decides what is cached."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from cacheblend.scheduling.cost_model import CostModel
from eval.trace.workload import TraceRequest, Workload


@dataclass(frozen=True, slots=True)
class CacheOutcome:
    """What requests demanded and what of it was cached when they arrived; hits are fractions in a bound.

    Attributes:
        demanded_bytes: KV bytes of the documents of all prompts.
        hit_bytes: of these, cached.
        demanded_chunks: documents of all prompts.
        hit_chunks: of these, cached.
        saved_s: seconds of prefill that the hits save, nothing of them recomputed.
    """

    demanded_bytes: int
    hit_bytes: float
    demanded_chunks: int
    hit_chunks: float
    saved_s: float

    @property
    def byte_hit_rate(self) -> float:
        """Share of the demanded bytes that were cached, 0 where none was demanded."""
        return self.hit_bytes / self.demanded_bytes if self.demanded_bytes else 0.0

    @property
    def chunk_hit_rate(self) -> float:
        """Share of the demanded documents that were cached, 0 where none was demanded."""
        return self.hit_chunks / self.demanded_chunks if self.demanded_chunks else 0.0


@dataclass(frozen=True, slots=True)
class PrefillSaving:
    """Seconds of prefill that a cached document saves."""

    costs: CostModel

    def of_prompt(self, workload: Workload, request: TraceRequest) -> Iterator[tuple[str, float]]:
        """Yield each document of a prompt with the seconds of its prefill behind those before it."""
        context = 0
        for document in request.documents:
            rows = workload.tokens[document]
            yield document, self.costs.prefill_seconds(rows, context)
            context += rows


class Tally:
    """Adds up hits over the requests of a workload."""

    def __init__(self, workload: Workload, saving: PrefillSaving) -> None:
        self._workload = workload
        self._saving = saving
        self._outcome = CacheOutcome(0, 0.0, 0, 0.0, 0.0)

    def count(self, request: TraceRequest, cached: Container[str]) -> None:
        """Count a request that meets these cached documents."""
        prompt = list(self._saving.of_prompt(self._workload, request))
        hits = [(document, saved_s) for document, saved_s in prompt if document in cached]
        before = self._outcome
        self._outcome = CacheOutcome(
            before.demanded_bytes + sum(self._workload.nbytes(document) for document, _ in prompt),
            before.hit_bytes + sum(self._workload.nbytes(document) for document, _ in hits),
            before.demanded_chunks + len(prompt),
            before.hit_chunks + len(hits),
            before.saved_s + sum(saved_s for _, saved_s in hits),
        )

    def outcome(self) -> CacheOutcome:
        """The sums so far."""
        return self._outcome
