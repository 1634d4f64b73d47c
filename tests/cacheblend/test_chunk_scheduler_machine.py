"""`ChunkScheduler` beside a real store, in any order of calls: budget, pins and catalogue always hold."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cacheblend_samples import BYTES_PER_TOKEN, identity_of, plan_of, tiny_kv
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheblend.plan import Policy
from cacheblend.protocols import Advice
from cacheblend.scheduling.catalogue import ON_HOST
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.selectors import make_selector
from kvstore.errors import ChunkUnavailable
from kvstore.eviction import LruPolicy
from kvstore.store import ChunkStore
from kvstore.tiers import Tier

CHUNKS = [identity_of(seed, tokens) for seed, tokens in enumerate((2, 4, 4, 6, 8, 10), start=1)]
INDEXES = st.lists(st.integers(0, len(CHUNKS) - 1), min_size=1, max_size=4)


class SchedulerBesideStore(RuleBasedStateMachine):
    """Does what the engine does with the scheduler's decisions, and what other askers do to the store meanwhile."""

    @initialize(budget=st.integers(0, 24), on_disk=st.booleans(), before=INDEXES)
    def start(self, budget, on_disk, before):
        self.folder = Path(tempfile.mkdtemp()) if on_disk else None
        self.budget = budget * BYTES_PER_TOKEN
        self.store = ChunkStore(self.folder, self.budget)
        for index in before:
            self.store.put(tiny_kv(CHUNKS[index]))
        self.scheduler = ChunkScheduler({Tier.HOST: self.budget}, self.store.records(), LruPolicy)
        self.store.subscribe(self.scheduler.on_event)
        self.requests = {}
        self.flying = {}
        self.came_otherwise = set()
        self.count = 0

    def carry_out(self, loads, evictions):
        gone = {eviction.key for eviction in evictions}
        assert len(gone) == len(evictions), "a chunk was evicted twice in one decision"
        assert not gone & self.pinned_keys(), "a pinned chunk was evicted"
        for key in gone:
            assert self.store.evict(key, Tier.HOST) > 0, "what was evicted was not there"
        assert not loads or self.scheduler.used_bytes(Tier.HOST) <= self.budget, (
            "more was decided than the budget allows"
        )
        for order in loads:
            assert order.target is Tier.HOST
            again = order.chunk.key in self.flying and order.chunk.key not in self.came_otherwise
            assert not again, "a load in flight was decided again"
            self.came_otherwise.discard(order.chunk.key)
            self.flying[order.chunk.key] = order.chunk

    def pinned_keys(self):
        return {key for keys, _ in self.requests.values() for key in keys}

    @rule(indexes=INDEXES, policy=st.sampled_from(list(Policy)), name=st.sampled_from(["none", "query", "full"]))
    def admit(self, indexes, policy, name):
        plan = plan_of([CHUNKS[i] for i in indexes], make_selector(name))
        servable = {chunk.key for chunk in CHUNKS if self.store.lookup(chunk) is not None}
        admission = self.scheduler.admit(str(self.count), plan, policy)
        reused = set(admission.plan.keys)
        if policy is Policy.BLEND:
            assert reused == set(plan.keys) & servable
        assert reused <= servable
        # What recomputes everything reads nothing: its chunks may go.
        read = set() if name == "full" else reused
        assert {order.chunk.key for order in admission.loads} <= read
        assert admission.promotions == ()
        missing = [s.identity.key not in servable for s in plan.segments if s.identity is not None]
        if policy is not Policy.FULL:
            assert admission.plan.fallback_reasons.count("missing") == sum(missing)
        self.requests[str(self.count)] = (read, self.store.pin(sorted(read)))
        self.count += 1
        self.carry_out(admission.loads, admission.evictions)

    @rule(indexes=INDEXES)
    def advise(self, indexes):
        chunks = [CHUNKS[i] for i in indexes]
        step = self.scheduler.step([Advice(chunk, 0.5) for chunk in chunks])
        for_advice = {eviction.key for eviction in step.evictions if eviction.reason == "prediction"}
        assert not for_advice & {chunk.key for chunk in chunks}, "advised chunks pushed one another out"
        self.carry_out(step.promotions, step.evictions)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), cancelled=st.booleans())
    def end_a_load(self, data, cancelled):
        chunk = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying))))
        self.came_otherwise.discard(chunk.key)
        if cancelled:
            self.scheduler.on_not_loaded(chunk.key)
            return
        try:
            self.store.load(chunk)
        except ChunkUnavailable as gone:
            sound = gone.reason.value == "host_budget"
            (self.scheduler.on_not_loaded if sound else self.scheduler.on_unavailable)(chunk.key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        _, pins = self.requests.pop(name)
        pins.release()
        self.scheduler.release(name)

    @rule(index=st.integers(0, len(CHUNKS) - 1))
    def someone_collects(self, index):
        """What comes so while its load is in flight may leave again and be decided again before that ends."""
        self.store.put(tiny_kv(CHUNKS[index]))
        if CHUNKS[index].key in self.flying and self.store.lookup(CHUNKS[index]) is Tier.HOST:
            self.came_otherwise.add(CHUNKS[index].key)

    @rule(index=st.integers(0, len(CHUNKS) - 1), tier=st.sampled_from([Tier.HOST, Tier.DISK]))
    def someone_evicts(self, index, tier):
        if CHUNKS[index].key not in self.pinned_keys():
            self.store.evict(CHUNKS[index].key, tier)

    @invariant()
    def the_catalogue_is_the_store(self):
        if not hasattr(self, "store"):
            return
        catalogue = self.scheduler._catalogue
        for chunk in CHUNKS:
            tier = self.store.lookup(chunk)
            assert (chunk.key in catalogue) == (tier is not None)
            assert bool(catalogue[chunk.key][2] & ON_HOST) == (tier is Tier.HOST)

    @invariant()
    def bytes_and_pins_are_what_was_decided(self):
        if not hasattr(self, "store"):
            return
        coming = self.scheduler._host._coming
        in_flight = sum(coming.values())
        assert self.scheduler.used_bytes(Tier.HOST) - in_flight == self.store.host_bytes_used <= self.budget
        assert coming.keys() <= self.flying.keys()
        assert self.scheduler.pinned() == sum(len(keys) for keys, _ in self.requests.values())

    def teardown(self):
        if not hasattr(self, "store"):
            return
        for name, (_, pins) in self.requests.items():
            pins.release()
            self.scheduler.release(name)
        assert self.scheduler.pinned() == 0
        assert self.store.pinned_count() == 0
        if self.folder is not None:
            shutil.rmtree(self.folder)


SchedulerBesideStore.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_budget_pins_and_catalogue_hold_in_any_order = SchedulerBesideStore.TestCase
