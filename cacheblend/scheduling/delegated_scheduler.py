"""`DelegatedScheduler`: for engines that decide about chunk KV themselves. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import Admission, Advice, Eviction, PredictorEvent, SchedulerStep
from cacheblend.scheduling.cost_model import CostModel
from kvstore.events import StoreEvent
from kvstore.key import ChunkKey
from kvstore.tiers import Tier


class DelegatedScheduler:
    """Implements `cacheblend.protocols.KVCacheScheduler` without deciding: plans pass as they stand.

    The runner's own scheduler fixes the effective plan, pins, loads and evicts, and the request's report says what
    came of it. Only the policy `full` is applied here: its prompts ask nothing of anybody.
    """

    def __init__(self) -> None:
        self._admitted: set[str] = set()

    def on_event(self, event: StoreEvent) -> None:
        """Nothing to follow."""

    def admit(self, request_id: str, plan: BlendPlan, policy: Policy) -> Admission:
        """See `KVCacheScheduler.admit`; nothing is loaded or evicted."""
        if request_id in self._admitted:
            raise BlendError(f"Request '{request_id}' was admitted before; give each request its own id.")
        self._admitted.add(request_id)
        return Admission(plan.as_full() if policy is Policy.FULL else plan, (), ())

    def on_unavailable(self, key: ChunkKey) -> None:
        """Nothing was ordered."""

    def on_not_loaded(self, key: ChunkKey, target: Tier = Tier.HOST) -> None:
        """Nothing was ordered."""

    def release(self, request_id: str) -> None:
        """See `KVCacheScheduler.release`."""
        self._admitted.discard(request_id)

    def step(self, advice: Sequence[Advice]) -> SchedulerStep:
        """Nothing is moved on advice."""
        return SchedulerStep()

    def set_budget(self, tier: Tier, nbytes: int) -> tuple[Eviction, ...]:
        """Nothing to keep to: the runner has its own budgets."""
        return ()

    def calibrate(self, costs: CostModel) -> None:
        """Nothing to compare."""

    def pinned(self) -> int:
        """See `KVCacheScheduler.pinned`: none."""
        return 0


class NoAdvice:
    """Implements `cacheblend.protocols.SpeculativePredictor` for an engine that nobody can advise."""

    def observe(self, event: PredictorEvent) -> None:
        """Nothing is remembered."""

    def advice(self, limit: int) -> list[Advice]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing is held."""
