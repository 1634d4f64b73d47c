"""`LookAheadPredictor`: what queued questions will need, then what the retriever nearly picked. Imports no torch."""

from __future__ import annotations

from cacheblend.protocols import Advice, CandidatesSeen, PredictorEvent, QuestionFinished, QuestionQueued
from kvstore.key import ChunkIdentity, ChunkKey

CANDIDATE_CONFIDENCE = 0.25
"""Confidence of the best candidate beyond top-k of the first question in the queue."""


class LookAheadPredictor:
    """Implements `cacheblend.protocols.SpeculativePredictor`.

    A chunk of the n-th question in the queue has confidence 1/n; candidates beyond top-k come after, falling with
    their rank. Generated tokens are not used.
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
        elif isinstance(event, QuestionFinished):
            self._queued.pop(event.request_id, None)
            self._candidates.pop(event.request_id, None)

    def advice(self, limit: int) -> list[Advice]:
        """See `SpeculativePredictor.advice`."""
        best: dict[ChunkKey, Advice] = {}
        for place, (request_id, chunks) in enumerate(self._queued.items(), start=1):
            for chunk in chunks:
                best.setdefault(chunk.key, Advice(chunk, 1.0 / place))
            for rank, chunk in enumerate(self._candidates.get(request_id, ()), start=1):
                best.setdefault(chunk.key, Advice(chunk, CANDIDATE_CONFIDENCE / (place * rank)))
        return sorted(best.values(), key=lambda piece: -piece.confidence)[:limit]
