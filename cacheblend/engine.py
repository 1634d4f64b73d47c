"""`BlendEngine`: the one place where runner, scheduler, predictor and prefetcher meet. Imports no torch.

A request waits, loads, runs and finishes. Each step admits what waits, starts transfers, hands requests whose chunks
are there to the runner, and runs it once. Nothing of the four parts reaches into another one; the engine carries
their messages.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, require_fits
from cacheblend.protocols import (
    Advice,
    BlendReport,
    CandidatesSeen,
    Eviction,
    FinishReason,
    KVCacheScheduler,
    ModelRunner,
    PredictorEvent,
    QuestionFinished,
    QuestionQueued,
    QuestionStarted,
    SchedulerStep,
    SpeculativePredictor,
    TokensGenerated,
)
from cacheblend.reports import bytes_by_first_tier
from cacheblend.request import EngineRequest, EngineStep, RequestOutcome
from kvstore.errors import UnavailableReason
from kvstore.events import StoreEvent
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import Tier
from kvstore.transfer import AsyncPrefetcher, TransferOrder, TransferResult

if TYPE_CHECKING:
    from kvstore.pins import PinHandle
    from kvstore.store import ChunkStore

logger = logging.getLogger(__name__)

TRANSFER_WAIT_S = 0.01
"""Longest wait of a step that has nothing else to do, so that new requests and aborts are heard meanwhile."""

MAX_PREFILL_ROWS = 8192
"""Prompt rows handed to the runner in one step; a larger prompt goes alone."""

_SOUND = frozenset({UnavailableReason.HOST_BUDGET, UnavailableReason.CANCELLED})
"""Reasons a load did not happen although the chunk is sound: it is read through from disk."""


@dataclass
class _Request:
    request: EngineRequest
    submitted: float
    plan: BlendPlan
    reason: str | None = None
    loading: set[ChunkKey] = field(default_factory=set)
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    pins: PinHandle | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    error: BlendError | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.request.request_id


class BlendEngine:
    """Serves requests over the four parts. Not thread-safe: one thread drives it.

    Args:
        runner: runs the model.
        store: holds chunk KV; the engine subscribes the scheduler to its events.
        scheduler: decides.
        predictor: advises; one that raises is not asked again.
        prefetcher: moves.
        max_running: requests that load or run at a time; the others wait in order.
        advice_limit: pieces of advice looked at in a step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: ChunkStore,
        scheduler: KVCacheScheduler,
        predictor: SpeculativePredictor,
        prefetcher: AsyncPrefetcher,
        max_running: int = 8,
        advice_limit: int = 16,
    ) -> None:
        self._runner = runner
        self._store = store
        self._scheduler = scheduler
        self._predictor: SpeculativePredictor | None = predictor
        self._prefetcher = prefetcher
        self._max_running = max_running
        self._advice_limit = advice_limit
        self._waiting: dict[str, _Request] = {}
        self._loading: dict[str, _Request] = {}
        self._running: dict[str, _Request] = {}
        self._ended: list[RequestOutcome] = []
        self._flying: dict[tuple[ChunkKey, Tier], ChunkIdentity] = {}
        # Store events arrive on the prefetcher's threads; the scheduler belongs to this one.
        self._events: queue.SimpleQueue[StoreEvent] = queue.SimpleQueue()
        self._unsubscribe = store.subscribe(self._events.put)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._loading or self._running or self._ended)

    def submit(self, request: EngineRequest, submitted: float | None = None) -> None:
        """Queue a request.

        Args:
            request: what to serve.
            submitted: `time.perf_counter()` when it was asked, from which its times count; now by default.

        Raises:
            BlendError: if its id is in use, or prompt and answer do not fit the model's context.
        """
        if any(request.request_id in group for group in (self._waiting, self._loading, self._running)):
            raise BlendError(f"Request id '{request.request_id}' is in use; give each request its own.")
        require_fits(request.plan.length, request.sampling.max_tokens, self._runner.max_model_len)
        self._waiting[request.request_id] = _Request(request, submitted or time.perf_counter(), request.plan)
        hints = request.hints
        self._observe(QuestionQueued(request.request_id, request.plan.chunks_read, hints.session_id))
        if hints.candidates:
            self._observe(CandidatesSeen(request.request_id, hints.candidates))

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing; unknown ones are let be."""
        for group in (self._waiting, self._loading):
            if request_id in group:
                self._finish(group.pop(request_id), FinishReason.ABORT, BlendReport())
        if request_id in self._running:
            self._runner.abort(request_id)

    def step(self) -> EngineStep:
        """Move everything on by one step of the runner.

        Whatever it raises is a failure of one of the four parts: nothing more can be served then but `close`.
        """
        self._follow_store()
        self._admit()
        self._promote()
        self._take_transfers(self._prefetcher.poll())
        if self._loading and not self._running and all(state.loading for state in self._loading.values()):
            self._wait_for_transfers()
        self._start_ready()
        step_id, tokens = self._run()
        finished, self._ended = tuple(self._ended), []
        return EngineStep(step_id, tokens, finished)

    def close(self) -> None:
        """Abort what is left, stop following the store and stop the transfers."""
        for request_id in [*self._waiting, *self._loading]:
            self.abort(request_id)
        # Without another step of the runner: it may be what failed.
        for request_id in list(self._running):
            self._runner.abort(request_id)
            self._runner.release(request_id)
            self._finish(self._running.pop(request_id), FinishReason.ABORT, BlendReport())
        self._unsubscribe()
        self._prefetcher.close()
        if self._predictor is not None:
            self._predictor.close()

    def _follow_store(self) -> None:
        while True:
            try:
                self._scheduler.on_event(self._events.get_nowait())
            except queue.Empty:
                return

    def _admit(self) -> None:
        while self._waiting and len(self._loading) + len(self._running) < self._max_running:
            state = self._waiting.pop(next(iter(self._waiting)))
            admission = self._scheduler.admit(state.id, state.plan, state.request.policy)
            state.plan, state.reason = admission.plan, admission.reason
            read = [chunk.key for chunk in state.plan.chunks_read]
            state.pins = self._store.pin(read)
            self._evict(admission.evictions)
            self._start_transfers((*admission.loads, *admission.promotions))
            # Chunks that another request or advice has started are waited for as well.
            state.loading = {key for key in read if (key, Tier.HOST) in self._flying}
            self._loading[state.id] = state

    def _promote(self) -> None:
        """Act on advice: bring what will probably be wanted nearer, within the budgets."""
        decision: SchedulerStep = self._scheduler.step(self._advice())
        self._evict(decision.evictions)
        self._start_transfers(decision.promotions)

    def _observe(self, event: PredictorEvent) -> None:
        if self._predictor is not None:
            try:
                self._predictor.observe(event)
            except Exception:
                self._lose_predictor()

    def _advice(self) -> list[Advice]:
        if self._predictor is not None:
            try:
                return self._predictor.advice(self._advice_limit)
            except Exception:
                self._lose_predictor()
        return []

    def _lose_predictor(self) -> None:
        logger.exception("the predictor failed; the engine goes on without advice")
        self._predictor = None

    def _start_transfers(self, orders: tuple[TransferOrder, ...]) -> None:
        self._flying.update(((order.chunk.key, order.target), order.chunk) for order in orders)
        self._prefetcher.start(orders)

    def _evict(self, evictions: Iterable[Eviction]) -> None:
        for eviction in evictions:
            self._store.evict(eviction.key, eviction.tier)
            logger.debug("chunk %s leaves %s: %s", eviction.key[:12], eviction.tier, eviction.reason)
        self._follow_store()

    def _wait_for_transfers(self) -> None:
        oldest = next(iter(self._loading.values()))
        self._prefetcher.wait(tuple(oldest.loading), TRANSFER_WAIT_S)
        self._take_transfers(self._prefetcher.poll())

    def _take_transfers(self, results: Iterable[TransferResult]) -> None:
        for result in results:
            chunk = self._flying.pop((result.key, result.target), None)
            if chunk is not None and (not result.ok or result.tier_from is result.target):
                self._note_not_brought(chunk, result)
            if result.target is Tier.HOST:
                self._tell_those_who_wait(result)
        self._follow_store()

    def _note_not_brought(self, chunk: ChunkIdentity, result: TransferResult) -> None:
        """Tell the scheduler whether the chunk is gone, or only did not come this time, or was there already."""
        if result.ok or result.reason in _SOUND or self._store.lookup(chunk) is not None:
            self._scheduler.on_not_loaded(chunk.key, result.target)
        else:
            self._scheduler.on_unavailable(chunk.key)

    def _tell_those_who_wait(self, result: TransferResult) -> None:
        for state in self._loading.values():
            if result.key in state.loading:
                state.loading.discard(result.key)
                self._apply(state, result)

    @staticmethod
    def _apply(state: _Request, result: TransferResult) -> None:
        if result.ok and result.tier_from is not None:
            state.loaded_bytes[result.tier_from.value] += result.nbytes
        elif result.reason is not None and result.reason not in _SOUND:
            state.plan = state.plan.with_fresh({result.key: result.reason.value})

    def _start_ready(self) -> None:
        rows = 0
        for state in [s for s in self._loading.values() if not s.loading]:
            if rows and rows + state.plan.length > MAX_PREFILL_ROWS:
                return
            rows += state.plan.length
            state.started = time.perf_counter()
            del self._loading[state.id]
            try:
                self._runner.prefill(
                    state.plan, state.request.sampling, state.id, state.request.policy, state.request.hints
                )
            except BlendError as error:
                state.error = error
                self._finish(state, FinishReason.ERROR, BlendReport())
            else:
                self._running[state.id] = state
                self._observe(QuestionStarted(state.id))

    def _run(self) -> tuple[int | None, dict[str, tuple[int, ...]]]:
        if not self._running:
            return None, {}
        output = self._runner.step()
        now = time.perf_counter()
        for request_id, tokens in output.tokens.items():
            state = self._running[request_id]
            state.tokens.extend(tokens)
            state.first_token = state.first_token or now
            state.last_token = now
            self._observe(TokensGenerated(request_id, tokens))
        for request_id, reason in output.finished.items():
            report = self._runner.report(request_id)
            self._runner.release(request_id)
            self._finish(self._running.pop(request_id), reason, report)
        return output.step_id, dict(output.tokens)

    def _finish(self, state: _Request, reason: FinishReason, report: BlendReport) -> None:
        if state.pins is not None:
            state.pins.release()
        self._scheduler.release(state.id)
        self._observe(QuestionFinished(state.id))
        report.bytes_loaded = bytes_by_first_tier(report.bytes_loaded, state.loaded_bytes)
        if state.reason is not None and state.reason not in report.fallback_reasons:
            report.fallback_reasons = (*report.fallback_reasons, state.reason)
        self._ended.append(_outcome(state, reason, report))


def _outcome(state: _Request, reason: FinishReason, report: BlendReport) -> RequestOutcome:
    ttft = tpot = None
    if state.first_token is not None and state.last_token is not None:
        ttft = (state.first_token - state.submitted) * 1e3
        if len(state.tokens) > 1:
            tpot = (state.last_token - state.first_token) * 1e3 / (len(state.tokens) - 1)
    began = state.started or time.perf_counter()
    queued = (began - state.submitted) * 1e3
    return RequestOutcome(state.id, tuple(state.tokens), reason, ttft, tpot, queued, report, state.error)
