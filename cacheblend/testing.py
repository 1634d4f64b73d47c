"""Fakes of the four protocols, so that each part can be tested without the others. Imports no torch.

They decide nothing of their own: a test sets what they answer and reads what they were told.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cacheblend.errors import BlendError
from cacheblend.metadata import CacheFuseMetadata
from cacheblend.plan import BlendPlan, Policy, full_prefill_plan, require_fits
from cacheblend.protocols import (
    Admission,
    Advice,
    AsyncPrefetcher,
    BlendReport,
    Eviction,
    FinishReason,
    KVCacheScheduler,
    ModelRunner,
    PredictorEvent,
    PrefillHints,
    SchedulerStep,
    SpeculativePredictor,
    StepOutput,
)
from cacheblend.sampling_params import SamplingParams
from cacheblend.scheduling.cost_model import CostModel
from kvstore.errors import UnavailableReason
from kvstore.events import StoreEvent
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import Tier
from kvstore.transfer import TransferOrder, TransferResult

VOCABULARY = 1000


class FakeRunner(ModelRunner):
    """Runs no model: tokens follow from the effective plan alone, so a change of plan shows in them.

    Args:
        max_model_len: rows a sequence can have.
        bytes_per_token: KV bytes a reused row is reported to have been read with, from host memory.
        refused: by sequence id, what `prefill` refuses it with.
        schedules_kv: what it says about itself.

    Attributes:
        plans: the plan of every sequence it took, by id, kept after release.
        policies: the policy of each of them.
        closed: whether `close` was called.
        collected: the chunks it was asked to collect, prefix included, in order.
        live: ids that were not released yet.
        failure: raised by `step` when set.
    """

    def __init__(
        self,
        max_model_len: int = 4096,
        bytes_per_token: int = 0,
        refused: Mapping[str, BlendError] | None = None,
        schedules_kv: bool = False,
    ) -> None:
        self._schedules_kv = schedules_kv
        self._max_model_len = max_model_len
        self._bytes_per_token = bytes_per_token
        self._refused = refused or {}
        self._metadata = CacheFuseMetadata()
        self._sampling: dict[str, SamplingParams] = {}
        self._generated: dict[str, list[int]] = {}
        self._aborted: set[str] = set()
        self._steps = 0
        self.plans: dict[str, BlendPlan] = {}
        self.policies: dict[str, Policy] = {}
        self.closed = False
        self.collected: list[ChunkIdentity] = []
        self.live: set[str] = set()
        self.failure: BaseException | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """See `ModelRunner.kv_bytes_per_token`."""
        return self._bytes_per_token

    @property
    def schedules_kv(self) -> bool:
        """As the test says."""
        return self._schedules_kv

    @property
    def fingerprint(self) -> str:
        """See `ModelRunner.fingerprint`."""
        return "fake"

    @property
    def max_model_len(self) -> int:
        """See `ModelRunner.max_model_len`."""
        return self._max_model_len

    @property
    def cache_fuse_metadata(self) -> CacheFuseMetadata:
        """See `ModelRunner.cache_fuse_metadata`; the fake only keeps it."""
        return self._metadata

    def collect(self, chunks: Sequence[Sequence[int]], prefix: Sequence[int]) -> list[ChunkKey]:
        """Note the chunks; nothing is stored."""
        identities = [ChunkIdentity(self.fingerprint, tuple(prefix), tuple(chunk)) for chunk in chunks]
        self.collected.extend(identities)
        return [identity.key for identity in identities]

    def prefill(
        self,
        prompt: BlendPlan | Sequence[int],
        sampling: SamplingParams | None = None,
        sequence_id: str | None = None,
        policy: Policy = Policy.BLEND,
        hints: PrefillHints | None = None,
    ) -> str:
        """See `ModelRunner.prefill`."""
        sampling = sampling or SamplingParams()
        sequence_id = sequence_id or f"sequence-{len(self.plans)}"
        if sequence_id in self._refused:
            raise self._refused[sequence_id]
        if sequence_id in self.live:
            raise BlendError(f"Sequence id '{sequence_id}' is in use; release it first or choose another.")
        plan = prompt if isinstance(prompt, BlendPlan) else full_prefill_plan(prompt)
        require_fits(plan.length, sampling.max_tokens, self._max_model_len)
        self.plans[sequence_id] = plan
        self.policies[sequence_id] = policy
        self._sampling[sequence_id] = sampling
        self._generated[sequence_id] = []
        self.live.add(sequence_id)
        return sequence_id

    def step(self) -> StepOutput:
        """One token for everything that runs; `stop_token_ids` and `max_tokens` end a sequence."""
        if self.failure is not None:
            raise self.failure
        self._steps += 1
        finished = dict.fromkeys(self._aborted & self.live, FinishReason.ABORT)
        self._aborted.clear()
        tokens = {}
        for sequence_id in list(self._generated):
            token = self.token(self.plans[sequence_id], len(self._generated[sequence_id]))
            self._generated[sequence_id].append(token)
            tokens[sequence_id] = (token,)
            reason = self._reason(sequence_id, token)
            if reason is not None:
                finished[sequence_id] = reason
                del self._generated[sequence_id]
        return StepOutput(self._steps, tokens, finished)

    @staticmethod
    def token(plan: BlendPlan, index: int) -> int:
        """The `index`-th new token of a prompt: 0 to `VOCABULARY` - 1, the same in every process."""
        selector = plan.selector.spec if plan.selector is not None and plan.reused else None
        return zlib.crc32(repr((plan.token_ids, plan.keys, selector, index)).encode()) % VOCABULARY

    def report(self, sequence_id: str) -> BlendReport:
        """See `ModelRunner.report`; no row is reported as recomputed."""
        if sequence_id not in self.live:
            raise KeyError(sequence_id)
        plan = self.plans[sequence_id]
        report = BlendReport(fallback_reasons=plan.fallback_reasons)
        if plan.reused and plan.selector is not None:
            report.mode, report.selector, report.reused_tokens = "blend", plan.selector.spec, plan.reused_tokens
            report.bytes_loaded = {Tier.HOST.value: plan.reused_tokens * self._bytes_per_token}
        return report

    def abort(self, sequence_id: str) -> None:
        """See `ModelRunner.abort`."""
        if self._generated.pop(sequence_id, None) is not None:
            self._aborted.add(sequence_id)

    def release(self, sequence_id: str) -> None:
        """See `ModelRunner.release`."""
        self.live.discard(sequence_id)
        self._aborted.discard(sequence_id)

    def close(self) -> None:
        """Note it."""
        self.closed = True

    def _reason(self, sequence_id: str, token: int) -> FinishReason | None:
        sampling = self._sampling[sequence_id]
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._generated[sequence_id]) >= sampling.max_tokens else None


class FakeScheduler(KVCacheScheduler):
    """Admits every plan as it is and has all its chunks loaded, each once.

    Args:
        missing: chunks it makes fresh, each with the reason.
        evictions: chunks it evicts with the next admission.
        promotions: what it promotes at the next step, whatever the advice.
        after_use: what it promotes with the next admission.

    Attributes:
        events, admitted, released, unavailable, not_loaded, advice: what it was told, in order.
        budgets: the budgets it was given, the latest of each tier.
        costs: the costs it was given last.
    """

    def __init__(
        self,
        missing: Mapping[ChunkKey, str] | None = None,
        evictions: Iterable[Eviction] = (),
        promotions: Iterable[TransferOrder] = (),
        after_use: Iterable[TransferOrder] = (),
    ) -> None:
        self._missing = missing or {}
        self._evictions = tuple(evictions)
        self._promotions = tuple(promotions)
        self._after_use = tuple(after_use)
        self._asked: set[ChunkKey] = set()
        self._pins: Counter[str] = Counter()
        self.events: list[StoreEvent] = []
        self.admitted: list[str] = []
        self.released: list[str] = []
        self.unavailable: list[ChunkKey] = []
        self.not_loaded: list[tuple[ChunkKey, Tier]] = []
        self.budgets: dict[Tier, int] = {}
        self.costs: CostModel | None = None
        self.advice: list[tuple[Advice, ...]] = []

    def on_event(self, event: StoreEvent) -> None:
        """Note the event."""
        self.events.append(event)

    def admit(self, request_id: str, plan: BlendPlan, policy: Policy) -> Admission:
        """See `KVCacheScheduler.admit`; the policy `full` alone changes the plan."""
        if request_id in self._pins:
            raise BlendError(f"Request '{request_id}' was admitted before; give each request its own id.")
        plan = plan.as_full() if policy is Policy.FULL else plan.with_fresh(self._missing)
        self.admitted.append(request_id)
        wanted = {i.key: i for i in (span.segment.identity for span in plan.reused) if i is not None}
        self._pins[request_id] = len(wanted)
        loads = tuple(TransferOrder(chunk, Tier.HOST) for key, chunk in wanted.items() if key not in self._asked)
        self._asked.update(wanted)
        evictions, self._evictions = self._evictions, ()
        after_use, self._after_use = self._after_use, ()
        return Admission(plan, loads, evictions, None, after_use)

    def on_unavailable(self, key: ChunkKey) -> None:
        """Note the chunk."""
        self.unavailable.append(key)

    def on_not_loaded(self, key: ChunkKey, target: Tier = Tier.HOST) -> None:
        """Note the chunk and where it did not come."""
        self.not_loaded.append((key, target))

    def release(self, request_id: str) -> None:
        """See `KVCacheScheduler.release`."""
        self.released.append(request_id)
        self._pins.pop(request_id, None)

    def step(self, advice: Sequence[Advice]) -> SchedulerStep:
        """Note the advice and promote what the test said, once."""
        self.advice.append(tuple(advice))
        promotions, self._promotions = self._promotions, ()
        return SchedulerStep(promotions)

    def set_budget(self, tier: Tier, nbytes: int) -> tuple[Eviction, ...]:
        """Note the budget."""
        self.budgets[tier] = nbytes
        return ()

    def calibrate(self, costs: CostModel) -> None:
        """Note the costs."""
        self.costs = costs

    def pinned(self) -> int:
        """See `KVCacheScheduler.pinned`."""
        return self._pins.total()


class FakePredictor(SpeculativePredictor):
    """Gives the advice a test hands it, right or wrong, and notes what it observes.

    Attributes:
        observed: events in order.
        pieces: what it advises, at every call.
    """

    def __init__(self, pieces: Iterable[Advice] = ()) -> None:
        self.observed: list[PredictorEvent] = []
        self.pieces = list(pieces)

    def observe(self, event: PredictorEvent) -> None:
        """Note the event."""
        self.observed.append(event)

    def advice(self, limit: int) -> list[Advice]:
        """The first `limit` pieces."""
        return self.pieces[:limit]


class FakePrefetcher(AsyncPrefetcher):
    """Moves nothing: transfers end when a test says so, or at the next poll.

    Args:
        by_itself: whether transfers end at the next `poll` or `wait` without the test's doing.
        failures: chunks that do not come, and why.
        nbytes: bytes each transfer is said to have moved.

    Attributes:
        started: chunks in the order they were started, each once a target while in flight.
        orders: the same with their targets.
        waits: the longest time of each `wait`, None where there was no limit.
        closed: whether `close` was called.
    """

    def __init__(
        self,
        by_itself: bool = True,
        failures: Mapping[ChunkKey, UnavailableReason] | None = None,
        nbytes: int = 0,
    ) -> None:
        self._by_itself = by_itself
        self._failures = failures or {}
        self._nbytes = nbytes
        self._flying: dict[tuple[ChunkKey, Tier], None] = {}
        self._unpolled: dict[tuple[ChunkKey, Tier], TransferResult] = {}
        self._latest: dict[tuple[ChunkKey, Tier], TransferResult] = {}
        self.started: list[ChunkKey] = []
        self.orders: list[TransferOrder] = []
        self.waits: list[float | None] = []
        self.closed = False

    def start(self, orders: Sequence[TransferOrder]) -> None:
        """See `AsyncPrefetcher.start`."""
        for order in orders:
            if (order.chunk.key, order.target) not in self._flying:
                self._flying[order.chunk.key, order.target] = None
                self.started.append(order.chunk.key)
                self.orders.append(order)

    def finish(self, key: ChunkKey, target: Tier = Tier.HOST) -> None:
        """End a transfer: well, or as `failures` says."""
        reason = self._failures.get(key)
        if reason is None:
            source = Tier.DISK if target is Tier.HOST else Tier.HOST
            self._end(TransferResult(key, True, None, self._nbytes, 0.0, source, target))
        else:
            self._end(TransferResult.failed(key, reason, target))

    def poll(self) -> list[TransferResult]:
        """See `AsyncPrefetcher.poll`."""
        self._finish_by_itself(list(self._flying))
        finished = list(self._unpolled.values())
        self._unpolled.clear()
        return finished

    def wait(
        self, keys: Sequence[ChunkKey], timeout_s: float | None, *, target: Tier = Tier.HOST
    ) -> dict[ChunkKey, TransferResult]:
        """See `AsyncPrefetcher.wait`; returns at once in any case."""
        self.waits.append(timeout_s)
        self._finish_by_itself([(key, target) for key in keys if (key, target) in self._flying])
        ended = [key for key in keys if (key, target) in self._latest and (key, target) not in self._flying]
        return {key: self._latest[key, target] for key in ended}

    def wait_any(self, timeout_s: float, target: Tier | None = None) -> None:
        """See `AsyncPrefetcher.wait_any`; returns at once in any case."""
        self.waits.append(timeout_s)

    def cancel(self, key: ChunkKey, *, target: Tier = Tier.HOST) -> bool:
        """See `AsyncPrefetcher.cancel`; a transfer that has not ended has not begun."""
        if (key, target) not in self._flying:
            return False
        self._end(TransferResult.failed(key, UnavailableReason.CANCELLED, target))
        return True

    def in_flight(self, target: Tier | None = None) -> int:
        """See `AsyncPrefetcher.in_flight`."""
        return sum(target in (None, to) for _, to in self._flying)

    def pause(self) -> None:
        """See `AsyncPrefetcher.pause`; nothing is copied here."""

    def resume(self) -> None:
        """See `AsyncPrefetcher.resume`."""

    def close(self) -> None:
        """See `AsyncPrefetcher.close`."""
        for key, target in list(self._flying):
            self.cancel(key, target=target)
        self.closed = True

    def _finish_by_itself(self, flights: Iterable[tuple[ChunkKey, Tier]]) -> None:
        if self._by_itself:
            for key, target in flights:
                self.finish(key, target)

    def _end(self, result: TransferResult) -> None:
        flight = (result.key, result.target)
        del self._flying[flight]
        self._latest[flight] = result
        self._unpolled[flight] = result
