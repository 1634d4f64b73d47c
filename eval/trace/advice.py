"""A predictor's advice brought to a policy of eviction, as the scheduler brings it."""

from __future__ import annotations

from itertools import count

from cacheblend.protocols import (
    CandidatesSeen,
    QuestionFinished,
    QuestionQueued,
    QuestionStarted,
    SpeculativePredictor,
)
from eval.trace.workload import TraceRequest, Workload
from kvstore.eviction import EvictionPolicy
from kvstore.key import ChunkIdentity, ChunkKey

_PIECES = 256


class Adviser:
    """Tells a predictor of requests and a policy what the predictor expects after each.

    Args:
        workload: whose documents the requests name.
        predictor: new, as it is told of this workload alone.
    """

    def __init__(self, workload: Workload, predictor: SpeculativePredictor) -> None:
        self._chunks = {
            document: ChunkIdentity("trace", (), (number,)) for number, document in enumerate(sorted(workload.tokens))
        }
        self._documents = {chunk: ChunkKey(document) for document, chunk in self._chunks.items()}
        self._predictor = predictor
        self._numbers = count()
        self._said: dict[ChunkKey, float] = {}

    def see(self, request: TraceRequest, policy: EvictionPolicy) -> None:
        """A request arrives and is served at once; what is expected otherwise than before is told."""
        name = f"request-{next(self._numbers)}"
        documents = tuple(self._chunks[document] for document in request.documents)
        self._predictor.observe(QuestionQueued(name, documents, request.session))
        if request.candidates:
            candidates = tuple(self._chunks[document] for document in request.candidates)
            self._predictor.observe(CandidatesSeen(name, candidates))
        self._predictor.observe(QuestionStarted(name))
        self._predictor.observe(QuestionFinished(name))
        advice = {self._documents[piece.chunk]: piece.confidence for piece in self._predictor.advice(_PIECES)}
        for key in self._said.keys() | advice.keys():
            if advice.get(key) != self._said.get(key):
                policy.expect(key, advice.get(key, 0.0))
        self._said = advice

    def entered(self, document: str, policy: EvictionPolicy) -> None:
        """A document came into the cache: the policy is told what is expected of it."""
        key = ChunkKey(document)
        if key in self._said:
            policy.expect(key, self._said[key])
