"""Chunks on the move: carries the scheduler's decisions to the workers, and what came of them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import Admission, Eviction, PredictorEvent, SpeculativePredictor
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.scheduling.cost_model import CostModel
from cacheblend.vllm_backend.arrivals import Arrival, Arrivals
from cacheblend.vllm_backend.directory import ChunkDirectory
from cacheblend.vllm_backend.metrics import BlendStats
from kvstore.errors import UnavailableReason
from kvstore.events import Evicted, Published, StoreEvent
from kvstore.key import ChunkKey
from kvstore.tiers import Tier
from kvstore.transfer_values import TransferOrder, TransferResult

ADVICE_A_STEP = 16
"""Pieces of advice that are looked at in one step."""

REASONS_KEPT = 4_096
"""Evictions whose reason is remembered until the workers tell of them, those ordered last."""

SOUND = frozenset({UnavailableReason.HOST_BUDGET, UnavailableReason.CANCELLED})
"""Reasons a load did not happen although the chunk can be had: it is read through from where it is."""

PASSING = frozenset({UnavailableReason.UNREACHABLE})
"""Reasons a chunk cannot be had now although it is there: the next request may try again."""


class ChunkTraffic:
    """The scheduler, its advice, and the transfers it has ordered. Belongs to vLLM's scheduler thread.

    Args:
        scheduler: decides.
        tiers: the memory tiers that the workers have.
        directory: which chunks there are.
        predictor: advises; None for nobody.
        ranks: tensor-parallel size.
        stats: counts what moves.
    """

    def __init__(
        self,
        scheduler: ChunkScheduler,
        tiers: Sequence[Tier],
        directory: ChunkDirectory,
        predictor: SpeculativePredictor | None,
        ranks: int,
        stats: BlendStats,
    ) -> None:
        self._scheduler = scheduler
        self._tiers = tiers
        self._directory = directory
        self._predictor = predictor
        self._arrivals = Arrivals(ranks)
        self._stats = stats
        self._orders: list[TransferOrder] = []
        self._evictions: list[Eviction] = []
        self._admitted = False
        self._costs: CostModel | None = None
        self._gauged: dict[tuple[str, str], int] = {}
        self._why_evicted: dict[tuple[ChunkKey, Tier], str] = {}

    def admit(self, request_id: str, plan: BlendPlan, policy: Policy) -> tuple[Admission, set[ChunkKey]]:
        """Fix a request's effective plan, pin the chunks it reads, and order what it needs.

        Returns:
            The admission, and those of these chunks that are on their way to the host, for it or for somebody else.
        """
        admission = self._scheduler.admit(request_id, plan, policy)
        self._admitted = True
        self._carry(admission.evictions, [*admission.loads, *admission.promotions])
        return admission, self._arrivals.awaited(chunk.key for chunk in admission.plan.chunks_read)

    def release(self, request_id: str) -> None:
        """Let a request's pins go; unknown requests are let be."""
        self._scheduler.release(request_id)

    def observe(self, event: PredictorEvent) -> None:
        """Tell the predictor, if there is one."""
        if self._predictor is not None:
            self._predictor.observe(event)

    def take_orders(self) -> tuple[tuple[Eviction, ...], tuple[TransferOrder, ...]]:
        """What the workers shall evict, then bring, in this step; advice that is new has its share.

        A step that admits has work enough: advice waits for the next one.
        """
        predictor = None if self._admitted else self._predictor
        advice = predictor.advice(ADVICE_A_STEP) if predictor is not None else ()
        self._admitted = False
        step = self._scheduler.step(advice)
        self._carry(step.evictions, step.promotions)
        self._gauge()
        evictions, orders = tuple(self._evictions), tuple(self._orders)
        self._evictions.clear()
        self._orders.clear()
        return evictions, orders

    def take_events(self, told: Iterable[tuple[int, StoreEvent]]) -> list[StoreEvent]:
        """Follow the workers' stores.

        Returns:
            What is true of all ranks now.
        """
        events = self._directory.follow(told)
        for event in events:
            self._scheduler.on_event(event)
            if isinstance(event, Published):
                # Of an eviction that found nothing there.
                self._why_evicted.pop((event.key, event.tier), None)
            elif isinstance(event, Evicted):
                reason = self._why_evicted.pop((event.key, event.tier), "store")
                self._stats.count("evictions", f"{event.tier.value}:{reason}")
        return events

    def take_transfers(self, results: Sequence[tuple[int, TransferResult]]) -> list[Arrival]:
        """Follow the workers' transfers.

        Returns:
            Those to the host that have ended on all ranks.
        """
        arrivals = []
        for arrival in self._arrivals.take(results):
            if _is_gone(arrival):
                self.lose(arrival.chunk.key)
            else:
                # Where it arrived, its event has said so before; where not, its room is free again.
                self._scheduler.on_not_loaded(arrival.chunk.key, arrival.target)
            self._count(arrival)
            self._learn(arrival)
            if arrival.target is Tier.HOST:
                arrivals.append(arrival)
        return arrivals

    def lose(self, key: ChunkKey) -> None:
        """A chunk could not be had although it was thought to be there."""
        self._scheduler.on_unavailable(key)
        self._directory.lose(key)

    def set_budget(self, tier: Tier, nbytes: int) -> None:
        """Change a memory tier's budget; what must leave for it leaves with the next step.

        Raises:
            BlendError: for a cold tier or a negative budget.
        """
        self._carry(self._scheduler.set_budget(tier, nbytes), ())

    def budgets(self) -> dict[Tier, int]:
        """The byte budgets of the memory tiers."""
        return {tier: self._scheduler.budget_bytes(tier) for tier in self._tiers}

    def calibrate(self, costs: CostModel) -> None:
        """Decide by measured costs from now on."""
        self._costs = costs
        self._scheduler.calibrate(costs)

    def in_flight(self) -> int:
        """Transfers that were ordered and have not ended on all ranks."""
        return len(self._arrivals)

    def pinned(self) -> int:
        """Pins held by all requests together."""
        return self._scheduler.pinned()

    def close(self) -> None:
        """Let the store's folder and the predictor's process go."""
        self._directory.close()
        if self._predictor is not None:
            self._predictor.close()

    def _carry(self, evictions: Iterable[Eviction], orders: Sequence[TransferOrder]) -> None:
        for eviction in evictions:
            self._why_evicted[eviction.key, eviction.tier] = eviction.reason
            self._evictions.append(eviction)
        while len(self._why_evicted) > REASONS_KEPT:
            del self._why_evicted[next(iter(self._why_evicted))]
        self._arrivals.expect(orders)
        self._orders.extend(orders)

    def _gauge(self) -> None:
        """Say what the tiers hold now, if that has changed."""
        now = {("transfers_in_flight", ""): len(self._arrivals), ("pins", ""): self._scheduler.pinned()}
        for tier in self._tiers:
            now["tier_bytes", tier.value] = self._scheduler.used_bytes(tier)
            now["tier_budget_bytes", tier.value] = self._scheduler.budget_bytes(tier)
        for (name, label), value in now.items():
            if self._gauged.get((name, label)) != value:
                self._stats.gauge(name, label, value)
        self._gauged = now

    def _learn(self, arrival: Arrival) -> None:
        """Note the rate of a tier that could not be measured at start: the remote one."""
        result = arrival.result
        costs = self._costs
        if (
            costs is None
            or result.tier_from is not Tier.REMOTE
            or not result.nbytes
            or Tier.REMOTE in costs.bytes_per_s
        ):
            return
        rates = {**costs.bytes_per_s, Tier.REMOTE: result.nbytes / max(result.seconds, 1e-9)}
        self.calibrate(replace(costs, bytes_per_s=rates))

    def _count(self, arrival: Arrival) -> None:
        outcome = "ok" if arrival.failed is None else str(arrival.failed.reason)
        self._stats.count("transfers", f"{arrival.target.value}:{outcome}")
        self._stats.count("transfer_bytes", arrival.target.value, sum(arrival.bytes_from.values()))


def _is_gone(arrival: Arrival) -> bool:
    """Whether a load found that the chunk cannot be had; a copy to the GPU says nothing of the chunk elsewhere."""
    failed = arrival.failed
    return arrival.target is Tier.HOST and failed is not None and failed.reason not in SOUND | PASSING
