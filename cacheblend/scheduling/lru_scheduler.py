"""`LruScheduler`: a byte budget for host memory, pins, and least-recently-used eviction. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import Admission, Advice, Eviction, SchedulerStep
from cacheblend.scheduling.catalogue import Catalogue
from kvstore.events import Evicted, Published, StoreEvent
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.orderings import EvictionOrdering, LruOrdering
from kvstore.tiers import ChunkRecord, Tier

AUTO_FULL_SHARE = 0.9
"""`auto` prefills a prompt when blending would compute at least this share of its rows anyway."""


class LruScheduler:
    """Implements `cacheblend.protocols.KVCacheScheduler`. Not thread-safe: the engine's thread owns it.

    Args:
        host_budget_bytes: bytes of KV that host memory may hold.
        records: chunks that exist already.
        ordering: proposes what leaves host memory first; least recently used by default.
    """

    def __init__(
        self,
        host_budget_bytes: int,
        records: Iterable[ChunkRecord] = (),
        ordering: EvictionOrdering | None = None,
    ) -> None:
        self._budget = host_budget_bytes
        self._ordering = ordering or LruOrdering()
        self._catalogue = Catalogue()
        self._host_bytes = 0
        self._loading: dict[ChunkKey, int] = {}
        self._pins: Counter[ChunkKey] = Counter()
        self._requests: dict[str, tuple[ChunkKey, ...]] = {}
        self.take_over(records)

    def take_over(self, records: Iterable[ChunkRecord]) -> None:
        """Enter chunks that exist already; those that are known are left as they are."""
        for record in records:
            if record.key in self._catalogue:
                continue
            self._catalogue.enter(record)
            if Tier.HOST in record.tiers:
                self._now_on_host(record.key, record.nbytes)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, loads in flight included."""
        return self._host_bytes + sum(self._loading.values())

    def on_event(self, event: StoreEvent) -> None:
        """See `KVCacheScheduler.on_event`."""
        was_on_host = self._catalogue.on_host(event.key)
        self._catalogue.follow(event)
        if isinstance(event, Published) and event.tier is Tier.HOST and not was_on_host:
            self._loading.pop(event.key, None)
            self._now_on_host(event.key, event.nbytes)
        elif isinstance(event, Evicted) and event.tier is Tier.HOST and was_on_host:
            self._host_bytes -= event.nbytes
            self._ordering.remove(event.key)

    def admit(self, request_id: str, plan: BlendPlan, policy: Policy) -> Admission:
        """See `KVCacheScheduler.admit`; the decision reads the published keys, never tier, load or advice."""
        if request_id in self._requests:
            raise BlendError(f"Request '{request_id}' was admitted before; give each request its own id.")
        plan, reason = self._effective(plan, policy)
        keys = tuple(chunk.key for chunk in plan.chunks)
        self._requests[request_id] = keys
        self._pins.update(keys)
        for key in keys:
            self._ordering.touch(key)
        loads, evictions = self._make_room(plan.chunks, "admission", self._pins)
        return Admission(plan, loads, evictions, reason)

    def on_unavailable(self, key: ChunkKey) -> None:
        """See `KVCacheScheduler.on_unavailable`."""
        self._loading.pop(key, None)
        if not self._catalogue.on_host(key):
            self._catalogue.forget(key)

    def on_not_loaded(self, key: ChunkKey) -> None:
        """A load was given up although the chunk is sound: its room is free again."""
        self._loading.pop(key, None)

    def release(self, request_id: str) -> None:
        """See `KVCacheScheduler.release`."""
        for key in self._requests.pop(request_id, ()):
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def step(self, advice: Sequence[Advice]) -> SchedulerStep:
        """See `KVCacheScheduler.step`; advised chunks do not push one another out."""
        if not advice:
            return SchedulerStep()
        keep = {*self._pins, *(piece.chunk.key for piece in advice)}
        promotions, evictions = self._make_room([piece.chunk for piece in advice], "prediction", keep)
        return SchedulerStep(promotions, evictions)

    def pinned(self) -> int:
        """See `KVCacheScheduler.pinned`."""
        return sum(self._pins.values())

    def _effective(self, plan: BlendPlan, policy: Policy) -> tuple[BlendPlan, str | None]:
        if policy is Policy.FULL:
            return plan.as_full(), None
        missing = {key: "missing" for key in plan.keys if key not in self._catalogue}
        plan = plan.with_fresh(missing)
        if policy is Policy.AUTO and plan.reused and _rows_to_compute(plan) >= AUTO_FULL_SHARE * plan.length:
            return plan.as_full("auto_full_cheaper"), "auto_full_cheaper"
        return plan, None

    def _make_room(
        self, chunks: Iterable[ChunkIdentity], reason: str, keep: Iterable[ChunkKey]
    ) -> tuple[tuple[ChunkIdentity, ...], tuple[Eviction, ...]]:
        """The chunks that can be loaded within the budget, and what must leave for them."""
        kept = set(keep)
        loads: list[ChunkIdentity] = []
        evictions: list[Eviction] = []
        leaving = 0
        for chunk in chunks:
            key = chunk.key
            if key not in self._catalogue or key in self._loading or self._catalogue.on_host(key):
                continue
            size = self._catalogue.nbytes(key)
            if size > self._budget:
                continue
            shortage = self.host_bytes - leaving + size - self._budget
            victims = self._ordering.victims(shortage, kept)
            if shortage > 0 and not victims:
                continue
            for victim in victims:
                # It leaves the ordering now, so that no other decision of this step names it again.
                self._ordering.remove(victim)
                leaving += self._catalogue.nbytes(victim)
                evictions.append(Eviction(victim, reason))
            self._loading[key] = size
            loads.append(chunk)
        return tuple(loads), tuple(evictions)

    def _now_on_host(self, key: ChunkKey, nbytes: int) -> None:
        self._host_bytes += nbytes
        self._ordering.add(key, nbytes)


def _rows_to_compute(plan: BlendPlan) -> int:
    assert plan.selector is not None
    fresh = plan.length - plan.reused_tokens
    return fresh + plan.selector.expected_rows([span.length for span in plan.reused])
