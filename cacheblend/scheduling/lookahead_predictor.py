"""`LookAheadPredictor`: what queued questions will need, then what the retriever nearly picked. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from cacheblend.protocols import (
    Advice,
    CandidatesSeen,
    PredictorEvent,
    QuestionFinished,
    QuestionQueued,
    QuestionStarted,
)
from kvstore.key import ChunkIdentity, ChunkKey

CANDIDATE_CONFIDENCE = 0.25
"""Confidence of the best candidate beyond top-k of the first question in the queue."""


class LookAheadPredictor:
    """Implements `cacheblend.protocols.SpeculativePredictor`.

    A chunk of the n-th question in the queue has confidence 1/n; the r-th candidate beyond its top-k has
    `CANDIDATE_CONFIDENCE` / (n * r). A chunk that is both, or several times, has the highest of these. Generated
    tokens are not used.
    """

    def __init__(self) -> None:
        self._queued: dict[str, tuple[ChunkIdentity, ...]] = {}
        self._candidates: dict[str, tuple[ChunkIdentity, ...]] = {}

    def observe(self, event: PredictorEvent) -> None:
        """See `SpeculativePredictor.observe`."""
        if isinstance(event, QuestionQueued):
            self._queued[event.request_id] = event.chunks
        elif isinstance(event, CandidatesSeen):
            self._candidates[event.request_id] = event.chunks
        elif isinstance(event, QuestionStarted | QuestionFinished):
            self._queued.pop(event.request_id, None)
            self._candidates.pop(event.request_id, None)

    def advice(self, limit: int) -> list[Advice]:
        """See `SpeculativePredictor.advice`."""
        best: dict[ChunkKey, Advice] = {}
        for piece in [*self._wanted(), *self._nearly_wanted()]:
            known = best.get(piece.chunk.key)
            if known is None or known.confidence < piece.confidence:
                best[piece.chunk.key] = piece
        return sorted(best.values(), key=lambda piece: -piece.confidence)[:limit]

    def _wanted(self) -> Iterator[Advice]:
        for place, chunks in enumerate(self._queued.values(), start=1):
            yield from (Advice(chunk, 1.0 / place) for chunk in chunks)

    def _nearly_wanted(self) -> Iterator[Advice]:
        for place, request_id in enumerate(self._queued, start=1):
            for rank, chunk in enumerate(self._candidates.get(request_id, ()), start=1):
                yield Advice(chunk, CANDIDATE_CONFIDENCE / (place * rank))
