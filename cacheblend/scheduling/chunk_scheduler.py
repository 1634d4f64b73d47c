"""`ChunkScheduler`: which chunks are on the GPU and in host memory, under byte budgets. Imports no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import Admission, Advice, Eviction, SchedulerStep
from cacheblend.scheduling.admission_policy import effective_plan
from cacheblend.scheduling.catalogue import (
    IN_MEMORY,
    ON_GPU,
    ON_HOST,
    PLACE_OF,
    UNKNOWN,
    Catalogue,
    Entry,
    Places,
)
from cacheblend.scheduling.cost_model import CostModel
from cacheblend.scheduling.memory_budget import MemoryBudget
from kvstore.events import Evicted, Published, StoreEvent
from kvstore.eviction import EvictionPolicy, GdsfPolicy
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import ChunkRecord, Tier
from kvstore.transfer_values import TransferOrder

GPU_CONFIDENCE = 0.5
"""Least confidence with which an advised chunk is brought from host memory to the GPU."""

EVICTING_CONFIDENCE = 0.05
"""Least confidence with which an advised chunk has others leave for it; below, it takes free room only."""

ADVISED_KNOWN = 1024
"""Pieces of advice that hold at a time, those that came last."""

_COLDER = (Tier.HOST, Tier.DISK, Tier.REMOTE)
"""Where a chunk that left a memory tier is sought next, in order."""


class ChunkScheduler:
    """Implements `cacheblend.protocols.KVCacheScheduler`. Not thread-safe: the engine's thread owns it.

    What a request wants comes to host memory for its admission, and from there to the GPU for whoever wants it next.
    Advice brings chunks to host memory, and to the GPU with enough confidence; advised chunks do not push one another
    out. Leaving the GPU never takes a chunk's copy in host memory with it, nor does being on the GPU.

    A catalogue lives as long as the process, so a full garbage collection has the less to look at the less of it is
    tracked: entries are tuples of integers, and policies change what they know of a chunk in place. A process that has
    taken its catalogue over does well to call `gc.freeze()` once, as vLLM's engine core does when it has started.

    Args:
        budgets: bytes of KV that each memory tier may hold; one that is not named holds nothing.
        records: chunks that exist already.
        policy: makes what orders the chunks of one memory tier; cost-aware by default.
        costs: as measured; without them `auto` compares rows alone, and chunks are equally dear.

    Raises:
        BlendError: a budget for a cold tier, or a negative one.
    """

    def __init__(
        self,
        budgets: Mapping[Tier, int],
        records: Iterable[ChunkRecord] = (),
        policy: Callable[[], EvictionPolicy] = GdsfPolicy,
        costs: CostModel | None = None,
    ) -> None:
        self._costs = costs
        self._catalogue = Catalogue()
        self._gpu = MemoryBudget(Tier.GPU, self._catalogue, 0, policy())
        self._host = MemoryBudget(Tier.HOST, self._catalogue, 0, policy())
        self._memory = {memory.tier: memory for memory in (self._gpu, self._host)}
        self._pins: dict[ChunkKey, int] = {}
        self._pinned = 0
        self._requests: dict[str, tuple[ChunkKey, ...]] = {}
        self._advised: OrderedDict[ChunkKey, float] = OrderedDict()
        for tier, nbytes in budgets.items():
            self.set_budget(tier, nbytes)
        self.take_over(records)

    def take_over(self, records: Iterable[ChunkRecord]) -> None:
        """Enter chunks that exist already; those that are known are left as they are."""
        for record in records:
            if record.key in self._catalogue:
                continue
            self._catalogue.enter(record)
            for memory in self._memory.values():
                if memory.tier in record.tiers:
                    self._arrive(record.key, self._catalogue[record.key], memory)

    def used_bytes(self, tier: Tier) -> int:
        """Bytes in a memory tier, loads in flight included and without what was ordered to leave."""
        return self._memory[tier].used

    def budget_bytes(self, tier: Tier) -> int:
        """The byte budget of a memory tier."""
        return self._memory[tier].nbytes

    def on_event(self, event: StoreEvent) -> None:
        """See `KVCacheScheduler.on_event`."""
        if isinstance(event, Published):
            self._published(event)
        elif isinstance(event, Evicted):
            # What was ordered to leave is not in the catalogue's place any more.
            self._leave(event.key, event.tier)

    def admit(self, request_id: str, plan: BlendPlan, policy: Policy) -> Admission:
        """See `KVCacheScheduler.admit`.

        Under `auto` costs decide, and so do the tiers of the chunks; any other plan reads the published keys alone.
        """
        if request_id in self._requests:
            raise BlendError(f"Request '{request_id}' was admitted before; give each request its own id.")
        plan, reason = effective_plan(plan, policy, self._catalogue, self._costs)
        cold, warm = self._pin(request_id, plan.chunks_read)
        evictions: list[Eviction] = []
        loads = self._bring(cold, self._host, evictions)
        promotions = self._bring(warm, self._gpu, evictions)
        return Admission(plan, loads, tuple(evictions), reason, promotions)

    def on_unavailable(self, key: ChunkKey) -> None:
        """See `KVCacheScheduler.on_unavailable`; a chunk that came into memory otherwise stays."""
        self._gpu.call_off(key)
        self._host.call_off(key)
        if not self._catalogue[key][2] & IN_MEMORY:
            self._catalogue.forget(key)

    def on_not_loaded(self, key: ChunkKey, target: Tier = Tier.HOST) -> None:
        """See `KVCacheScheduler.on_not_loaded`."""
        self._memory[target].call_off(key)

    def release(self, request_id: str) -> None:
        """See `KVCacheScheduler.release`."""
        keys = self._requests.pop(request_id, ())
        self._pinned -= len(keys)
        pins, catalogue = self._pins, self._catalogue
        for key in keys:
            count = pins[key]
            if count > 1:
                pins[key] = count - 1
                continue
            del pins[key]
            nbytes, _, places = catalogue.get(key, UNKNOWN)
            if places & ON_GPU:
                self._gpu.release(key, nbytes)
            if places & ON_HOST:
                self._host.release(key, nbytes)

    def step(self, advice: Sequence[Advice]) -> SchedulerStep:
        """See `KVCacheScheduler.step`."""
        evictions: list[Eviction] = []
        self._shrink(self._gpu, evictions)
        self._shrink(self._host, evictions)
        orders = self._follow_advice(advice, evictions) if advice else []
        return SchedulerStep(tuple(orders), tuple(evictions)) if orders or evictions else _NOTHING

    def set_budget(self, tier: Tier, nbytes: int) -> tuple[Eviction, ...]:
        """See `KVCacheScheduler.set_budget`."""
        if tier not in self._memory:
            raise BlendError(f"The tier '{tier}' has no byte budget; give one for gpu or host.")
        if nbytes < 0:
            raise BlendError(f"A {tier} budget of {nbytes} bytes makes no sense; give 0 or more.")
        self._memory[tier].nbytes = nbytes
        evictions: list[Eviction] = []
        self._shrink(self._memory[tier], evictions)
        return tuple(evictions)

    def calibrate(self, costs: CostModel) -> None:
        """See `KVCacheScheduler.calibrate`."""
        self._costs = costs

    def pinned(self) -> int:
        """See `KVCacheScheduler.pinned`."""
        return self._pinned

    def _published(self, event: Published) -> None:
        place = PLACE_OF[event.tier]
        if self._catalogue[event.key][2] & place:
            return
        entry = self._catalogue.add(event.key, place, event.nbytes, event.tokens)
        if place & IN_MEMORY:
            self._arrive(event.key, entry, self._memory[event.tier])

    def _arrive(self, key: ChunkKey, entry: Entry, memory: MemoryBudget) -> None:
        cost_s, confidence = self._cost_of(entry, memory.tier), self._advised.get(key, 0.0)
        memory.arrive(key, entry[0], cost_s, confidence, key in self._pins)

    def _leave(self, key: ChunkKey, tier: Tier) -> None:
        place = PLACE_OF[tier]
        nbytes, _, places = self._catalogue.drop(key, place)
        if places & place & IN_MEMORY:
            self._memory[tier].leave(key, nbytes, key in self._pins)

    def _cost_of(self, entry: Entry, tier: Tier) -> float:
        """Seconds to have a chunk again once it has left `tier`: from the next tier, or computed."""
        if self._costs is None:
            return 0.0
        nbytes, tokens, places = entry
        computed = self._costs.prefill_seconds(tokens, 0)
        for colder in _COLDER:
            if colder is not tier and places & PLACE_OF[colder]:
                return min(computed, self._costs.reload_seconds(colder, nbytes))
        return computed

    def _pin(
        self, request_id: str, chunks: Sequence[ChunkIdentity]
    ) -> tuple[list[tuple[ChunkIdentity, int]], list[tuple[ChunkIdentity, int]]]:
        """Pin and use a request's chunks: those in no memory, and those in host memory alone, with their bytes."""
        self._requests[request_id] = tuple([chunk.key for chunk in chunks])
        self._pinned += len(chunks)
        pins, catalogue = self._pins, self._catalogue
        cold, warm = [], []
        for chunk in chunks:
            key = chunk.key
            count = pins.get(key, 0)
            pins[key] = count + 1
            nbytes, _, places = catalogue[key]
            if places & ON_GPU:
                self._gpu.use(key, nbytes, hold=not count)
            if places & ON_HOST:
                self._host.use(key, nbytes, hold=not count)
            if not places & IN_MEMORY:
                cold.append((chunk, nbytes))
            elif not places & ON_GPU:
                warm.append((chunk, nbytes))
        return cold, warm

    def _bring(
        self, chunks: Iterable[tuple[ChunkIdentity, int]], memory: MemoryBudget, evictions: list[Eviction]
    ) -> tuple[TransferOrder, ...]:
        orders = []
        for chunk, nbytes in chunks:
            if self._order(chunk.key, nbytes, memory, "admission", evictions):
                orders.append(TransferOrder(chunk, memory.tier))
        return tuple(orders)

    def _order(
        self,
        key: ChunkKey,
        nbytes: int,
        memory: MemoryBudget,
        reason: str,
        evictions: list[Eviction],
        spare: Collection[ChunkKey] = (),
    ) -> bool:
        """Have the chunk brought, and others leave for it, if it fits beside everything that is held."""
        if memory.is_coming(key):
            return False
        victims = memory.make_room(nbytes, spare)
        if victims is None:
            return False
        self._evict(victims, memory, reason, evictions)
        memory.expect_arrival(key, nbytes)
        return True

    def _evict(self, victims: Iterable[ChunkKey], memory: MemoryBudget, reason: str, evictions: list[Eviction]) -> None:
        for victim in victims:
            self._leave(victim, memory.tier)
            evictions.append(Eviction(victim, reason, memory.tier))

    def _shrink(self, memory: MemoryBudget, evictions: list[Eviction]) -> None:
        if memory.excess > 0:
            self._evict(memory.excess_victims(), memory, "budget", evictions)

    def _follow_advice(self, advice: Sequence[Advice], evictions: list[Eviction]) -> list[TransferOrder]:
        together = {piece.chunk.key for piece in advice if piece.confidence > 0}
        advised, catalogue = self._advised, self._catalogue
        orders = []
        for piece in advice:
            key, confidence = piece.chunk.key, piece.confidence
            if not 0.0 <= confidence <= 1.0:
                confidence = float(confidence > 1.0)
            nbytes, _, places = catalogue.get(key, UNKNOWN)
            # What is said again is the newest again.
            before = advised.pop(key, 0.0)
            if confidence:
                advised[key] = confidence
            if confidence != before and places & IN_MEMORY:
                self._expect(key, places, confidence)
            if len(advised) > ADVISED_KNOWN:
                self._forget_oldest_advice()
            if not confidence or not places:
                continue
            memory = self._advised_memory(places, confidence)
            if memory is None or (confidence < EVICTING_CONFIDENCE and nbytes > memory.free):
                continue
            if self._order(key, nbytes, memory, "prediction", evictions, together):
                orders.append(TransferOrder(piece.chunk, memory.tier))
        self._gpu.stop_sparing()
        self._host.stop_sparing()
        return orders

    def _forget_oldest_advice(self) -> None:
        key, _ = self._advised.popitem(last=False)
        self._expect(key, self._catalogue.get(key, UNKNOWN)[2], 0.0)

    def _expect(self, key: ChunkKey, places: Places, confidence: float) -> None:
        if places & ON_HOST:
            self._host.policy.expect(key, confidence)
        if places & ON_GPU:
            self._gpu.policy.expect(key, confidence)

    def _advised_memory(self, places: Places, confidence: float) -> MemoryBudget | None:
        """Where advice of this confidence brings a chunk that is somewhere: one memory tier further, if any."""
        if not places & IN_MEMORY:
            return self._host
        return self._gpu if confidence >= GPU_CONFIDENCE and not places & ON_GPU else None


_NOTHING = SchedulerStep()
