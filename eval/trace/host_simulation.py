"""A host tier of limited bytes over one disk, simulated: requests queue, load and answer while advice is followed."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cacheblend.protocols import (
    CandidatesSeen,
    QuestionFinished,
    QuestionQueued,
    QuestionStarted,
    SpeculativePredictor,
    TokensGenerated,
)
from cacheblend.scheduling.cost_model import CostModel
from eval.trace.workload import KV_BYTES_PER_TOKEN, Workload
from kvstore.key import ChunkIdentity
from kvstore.tiers import Tier

MEASURED_COSTS = CostModel(
    bytes_per_s={Tier.HOST: 55e9, Tier.DISK: 1.2e9},
    latency_s={Tier.DISK: 5e-4},
    prefill_rows_per_s=39_500.0,
    prefill_rows_squared_s=1.7e-10,
)
"""An 8B model on an H200: what DESIGN.md measured of prefill, pinned copies and that machine's disk."""

ADVICE = 128
"""Pieces of advice looked at."""
USED_BEFORE = 0.05
"""What was used is expected again with this confidence at least: a guess does not displace it."""
TICK_TOKENS = 32
"""Tokens that a predictor is told of at a time."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves the requests.

    Attributes:
        host_bytes: of KV that the host tier holds.
        costs: rates of the disk and of the model.
        running: requests that load or run at a time; the others queue.
        recomputed: share of a prompt's rows that a blend computes.
        decode_s: seconds a token.
        answer_tokens: mean length of an answer; lengths are geometric, drawn by `seed`, the same for every predictor.
        seed: of the lengths.
    """

    host_bytes: int
    costs: CostModel = MEASURED_COSTS
    running: int = 4
    recomputed: float = 0.15
    decode_s: float = 0.0051
    answer_tokens: int = 150
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What the demand for chunks met, in bytes unless said otherwise.

    Attributes:
        demanded: by requests when they were admitted.
        cached: of these, on the host since an earlier use.
        prefetched: of these, on the host because advice brought them.
        late: chunks whose prefetch was in flight or waiting for the disk when they were demanded.
        wasted: bytes brought on advice that left again, or were left over, without a use.
    """

    demanded: int = 0
    cached: int = 0
    prefetched: int = 0
    late: int = 0
    wasted: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the demanded bytes that were on the host in time."""
        return (self.cached + self.prefetched) / self.demanded if self.demanded else 0.0


class _Host:
    """Residents by worth: the time of their last use, moved towards now as far as advice expects them.

    What advice brings counts as used when what was unused for longest at its arrival was. So guesses fill free
    room and displace one another, and sure advice displaces nearly anything.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self.resident: dict[str, int] = {}
        self.last_use: dict[str, float] = {}
        self.pins: Counter[str] = Counter()
        self.expected: Mapping[str, float] = {}
        self.unused: set[str] = set()
        self.wasted = 0

    def arrive(self, document: str, nbytes: int, now: float, on_advice: bool) -> None:
        """A load ended, for which there was room."""
        if on_advice:
            self.unused.add(document)
        self.last_use[document] = self._oldest(now) if on_advice else now
        self.resident[document] = nbytes

    def use(self, document: str, now: float) -> None:
        """A request uses a resident."""
        self.last_use[document] = now
        self.unused.discard(document)

    def make_room(self, nbytes: int, now: float, confidence: float | None = None) -> bool:
        """Evict what is worth least; with a confidence only what is worth less than that gives, and all or nothing."""
        short = self.used + nbytes - self.budget
        if short <= 0:
            return True
        oldest = self._oldest(now)
        limit = math.inf if confidence is None else oldest + confidence * (now - oldest)
        worth = {document: self._worth(document, now) for document in self.resident if not self.pins[document]}
        victims = []
        for document in sorted(worth, key=worth.__getitem__):
            if short <= 0 or worth[document] >= limit:
                break
            victims.append(document)
            short -= self.resident[document]
        if short > 0:
            return False
        for document in victims:
            self._evict(document)
        return True

    def _oldest(self, now: float) -> float:
        return min(self.last_use.values(), default=now)

    def _worth(self, document: str, now: float) -> float:
        last = self.last_use[document]
        least = 0.0 if document in self.unused else USED_BEFORE
        return last + max(least, self.expected.get(document, 0.0)) * (now - last)

    def _evict(self, document: str) -> None:
        size = self.resident.pop(document)
        self.used -= size
        del self.last_use[document]
        if document in self.unused:
            self.unused.discard(document)
            self.wasted += size


@dataclass(slots=True)
class _Running:
    name: str
    documents: tuple[str, ...]
    tokens: int
    loading: set[str] = field(default_factory=set)


class HostSimulation:
    """One workload served once. The disk brings one chunk at a time, demanded ones first.

    Args:
        workload: the requests.
        chunks: document to the chunk that events and advice name it by.
        predictor: told of everything a real one is told of; its advice is followed in its order.
        serving: what serves.
    """

    def __init__(
        self,
        workload: Workload,
        chunks: Mapping[str, ChunkIdentity],
        predictor: SpeculativePredictor,
        serving: Serving,
    ) -> None:
        self._workload, self._chunks, self._predictor, self._serving = workload, chunks, predictor, serving
        self._documents = {chunk: document for document, chunk in chunks.items()}
        self._host = _Host(serving.host_bytes)
        self._now = 0.0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._queue: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._demands: deque[str] = deque()
        self._flying: str | None = None
        self._flying_on_advice = False
        self._advised: list[tuple[str, float]] = []
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Serve every request and return what their demands met."""
        draw = random.Random(self._serving.seed)
        for number, request in enumerate(self._workload.requests):
            tokens = 1 + int(draw.expovariate(1 / self._serving.answer_tokens))
            arriving = _Running(f"request-{number}", request.documents, tokens)
            self._at(request.arrival_s, lambda number=number, arriving=arriving: self._arrive(number, arriving))  # type: ignore[misc]
        while self._agenda:
            self._now, _, act = heapq.heappop(self._agenda)
            act()
            self._use_disk()
        self._outcome.wasted = self._host.wasted + sum(self._host.resident[name] for name in self._host.unused)
        return self._outcome

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), act))

    def _arrive(self, number: int, arriving: _Running) -> None:
        request = self._workload.requests[number]
        chunks = tuple(self._chunks[document] for document in request.documents)
        candidates = tuple(self._chunks[document] for document in request.candidates)
        self._predictor.observe(QuestionQueued(arriving.name, chunks, request.session))
        if candidates:
            self._predictor.observe(CandidatesSeen(arriving.name, candidates))
        self._take_advice()
        self._queue.append(arriving)
        self._admit()

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._serving.running:
            request = self._queue.popleft()
            self._running[request.name] = request
            for document in request.documents:
                self._demand(request, document)
            self._start_if_loaded(request)

    def _demand(self, request: _Running, document: str) -> None:
        host, size = self._host, self._workload.nbytes(document)
        self._outcome.demanded += size
        host.pins[document] += 1
        if document in host.resident:
            if document in host.unused:
                self._outcome.prefetched += size
            else:
                self._outcome.cached += size
            host.use(document, self._now)
            return
        request.loading.add(document)
        if document == self._flying:
            self._outcome.late += self._flying_on_advice
            self._flying_on_advice = False
        elif document not in self._demands:
            self._demands.append(document)

    def _use_disk(self) -> None:
        if self._flying is not None:
            return
        if self._demands:
            document, self._flying_on_advice = self._demands.popleft(), False
            # What finds no room is read past the host, for its request alone.
            kept = self._host.make_room(self._workload.nbytes(document), self._now)
        else:
            advised = self._best_advised()
            if advised is None:
                return
            document, kept, self._flying_on_advice = advised, True, True
        size = self._workload.nbytes(document)
        self._host.used += size if kept else 0
        self._flying = document
        self._at(self._now + self._serving.costs.reload_seconds(Tier.DISK, size), lambda: self._landed(document, kept))

    def _best_advised(self) -> str | None:
        for document, confidence in self._advised:
            if document not in self._host.resident:
                size = self._workload.nbytes(document)
                return document if self._host.make_room(size, self._now, confidence) else None
        return None

    def _landed(self, document: str, kept: bool) -> None:
        self._flying = None
        if kept:
            self._host.arrive(document, self._workload.nbytes(document), self._now, self._flying_on_advice)
        for request in list(self._running.values()):
            if document in request.loading:
                request.loading.discard(document)
                self._start_if_loaded(request)

    def _start_if_loaded(self, request: _Running) -> None:
        if request.loading:
            return
        self._predictor.observe(QuestionStarted(request.name))
        self._take_advice()
        rows = sum(self._workload.tokens[document] for document in request.documents)
        nbytes = rows * KV_BYTES_PER_TOKEN
        costs, fresh = self._serving.costs, round(rows * self._serving.recomputed)
        first = self._now + costs.reload_seconds(Tier.HOST, nbytes) + costs.recompute_seconds(fresh, rows)
        for done in range(TICK_TOKENS, request.tokens, TICK_TOKENS):
            self._at(first + done * self._serving.decode_s, lambda: self._generated(request.name, TICK_TOKENS))
        self._at(first + request.tokens * self._serving.decode_s, lambda: self._finish(request))

    def _generated(self, name: str, tokens: int) -> None:
        self._predictor.observe(TokensGenerated(name, (0,) * tokens))
        self._take_advice()

    def _finish(self, request: _Running) -> None:
        # What was generated after the last tick.
        self._predictor.observe(TokensGenerated(request.name, (0,) * ((request.tokens - 1) % TICK_TOKENS + 1)))
        self._predictor.observe(QuestionFinished(request.name))
        self._take_advice()
        del self._running[request.name]
        self._host.pins.subtract(request.documents)
        self._admit()

    def _take_advice(self) -> None:
        advice = self._predictor.advice(ADVICE)
        self._advised = [(self._documents[piece.chunk], piece.confidence) for piece in advice]
        self._host.expected = dict(self._advised)
