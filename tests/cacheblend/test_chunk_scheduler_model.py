"""`ChunkScheduler` beside a model that carries its decisions out late and in order: 10^5 random operations."""

from __future__ import annotations

import random
from collections import Counter

from cacheblend_samples import identity_of, plan_of

from cacheblend.plan import Policy
from cacheblend.protocols import Advice
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.scheduling.cost_model import CostModel
from kvstore.events import Evicted, Published
from kvstore.eviction import POLICIES
from kvstore.tiers import ChunkRecord, Tier

CHUNKS = [identity_of(seed, 1 + seed % 7) for seed in range(1, 41)]
BYTES_PER_TOKEN = 16
NBYTES = {chunk.key: BYTES_PER_TOKEN * len(chunk.token_ids) for chunk in CHUNKS}
MEMORY = (Tier.GPU, Tier.HOST)
COSTS = CostModel({Tier.HOST: 1e3, Tier.DISK: 1e2}, {Tier.DISK: 0.01}, 1e2)
OPERATIONS = 100_000
OPERATIONS_EACH = 500


class Model:
    """What a store would hold if it did what it is told, one order after another, when it gets to it.

    Attributes:
        there: chunks by memory tier, in fact.
        todo: orders that were not begun, evictions before what they make room for.
        flying: loads begun.
        plans: keys of each request, which must not leave.
    """

    def __init__(self, seed, policy):
        self.random = random.Random(seed)
        self.there = {tier: set() for tier in MEMORY}
        self.disk = {chunk.key for chunk in CHUNKS[: self.random.randint(20, 40)]}
        self.budgets = {tier: self.random.randint(0, 60) * BYTES_PER_TOKEN for tier in MEMORY}
        self.resizes = seed % 2 == 1
        records = [ChunkRecord(key, NBYTES[key], 4, frozenset({Tier.DISK})) for key in self.disk]
        self.scheduler = ChunkScheduler(self.budgets, records, POLICIES[policy], self.random.choice([None, COSTS]))
        self.todo, self.flying, self.plans, self.count = [], [], {}, 0
        self.seen = Counter()

    def pinned(self):
        return Counter(key for keys in self.plans.values() for key in keys)

    def decided(self, evictions, orders):
        pinned = self.pinned()
        for eviction in evictions:
            assert not pinned[eviction.key], "a pinned chunk was evicted"
            assert eviction.tier in MEMORY
        for order in orders:
            assert NBYTES[order.chunk.key] <= self.budgets[order.target]
            assert self.scheduler.used_bytes(order.target) <= self.budgets[order.target], "more than the budget allows"
            flight = (order.chunk.key, order.target)
            ordered = [(o.chunk.key, o.target) for kind, o in self.todo if kind == "load"]
            assert flight not in ordered, "a load was ordered twice"
            assert flight not in [(o.chunk.key, o.target) for o in self.flying], "a load in flight was ordered again"
        self.seen["evict"] += len(evictions)
        self.seen.update("load" if order.target is Tier.HOST else "promotion" for order in orders)
        self.todo += [("evict", eviction) for eviction in evictions] + [("load", order) for order in orders]

    def some(self, most):
        return self.random.sample(CHUNKS, self.random.randint(1, most))

    def admit(self):
        plan = plan_of(self.some(5))
        admission = self.scheduler.admit(str(self.count), plan, self.random.choice(list(Policy)))
        self.plans[str(self.count)] = set(admission.plan.keys)
        self.count += 1
        self.decided(admission.evictions, (*admission.loads, *admission.promotions))
        assert {order.target for order in admission.loads} <= {Tier.HOST}
        assert {order.target for order in admission.promotions} <= {Tier.GPU}

    def release(self):
        name = self.random.choice([*self.plans, "nobody"])
        self.scheduler.release(name)
        self.plans.pop(name, None)
        # Once more: a pin is given back once.
        self.scheduler.release(name)

    def step(self):
        advice = [Advice(chunk, self.random.choice([0.0, 0.02, self.random.random()])) for chunk in self.some(16)]
        step = self.scheduler.step(self.random.choice([advice, []]))
        self.decided(step.evictions, step.promotions)
        brought = {order.chunk.key for order in step.promotions}
        taken_back = {piece.chunk.key for piece in advice if not piece.confidence}
        assert not brought & taken_back, "taken back and brought"
        kept = {piece.chunk.key for piece in advice if piece.confidence}
        assert not any(e.key in kept for e in step.evictions if e.reason == "prediction"), "advice pushed advice out"

    def begin(self):
        """Do the next order: an eviction at once, a load later."""
        if not self.todo:
            return
        kind, order = self.todo.pop(0)
        if kind == "load":
            self.flying.append(order)
        elif order.key in self.there[order.tier]:
            self.leave(order.key, order.tier)

    def end(self):
        """A load ends, in whatever order: it comes, it is given up, or the chunk was there already."""
        if not self.flying:
            return
        order = self.flying.pop(self.random.randrange(len(self.flying)))
        key = order.chunk.key
        gone = key not in self.disk and not any(key in self.there[tier] for tier in MEMORY)
        if gone and self.random.random() < 0.5:
            self.scheduler.on_unavailable(key)
        elif gone or key in self.there[order.target] or self.random.random() < 0.2:
            self.seen["given up"] += 1
            self.scheduler.on_not_loaded(key, order.target)
        else:
            self.there[order.target].add(key)
            self.scheduler.on_event(Published(key, order.target, NBYTES[key], 4))

    def leave(self, key, tier):
        self.there[tier].discard(key)
        self.scheduler.on_event(Evicted(key, tier, NBYTES[key]))

    def disturb(self):
        """Somebody else puts a chunk on disk, or takes one away from any tier."""
        chunk = self.random.choice(CHUNKS)
        if self.random.random() < 0.6:
            self.disk.add(chunk.key)
            self.scheduler.on_event(Published(chunk.key, Tier.DISK, NBYTES[chunk.key], 4))
        elif not self.pinned()[chunk.key]:
            tier = self.random.choice([Tier.DISK, *MEMORY])
            if tier is Tier.DISK:
                self.disk.discard(chunk.key)
                self.scheduler.on_event(Evicted(chunk.key, tier, NBYTES[chunk.key]))
            elif chunk.key in self.there[tier]:
                self.leave(chunk.key, tier)

    def resize(self):
        tier = self.random.choice(MEMORY)
        self.budgets[tier] = self.random.randint(0, 60) * BYTES_PER_TOKEN
        self.decided(self.scheduler.set_budget(tier, self.budgets[tier]), ())

    def settle(self):
        """Carry everything out, let everybody go: then memory is what the scheduler thinks it is, within budget."""
        while self.todo:
            self.begin()
        while self.flying:
            self.end()
        for name in list(self.plans):
            self.scheduler.release(name)
        self.plans.clear()
        self.decided(self.scheduler.step([]).evictions, ())
        while self.todo:
            self.begin()
        assert self.scheduler.pinned() == 0
        for tier in MEMORY:
            assert sum(NBYTES[key] for key in self.there[tier]) == self.scheduler.used_bytes(tier) <= self.budgets[tier]
            memory = self.scheduler._memory[tier]
            assert memory.evictable == memory.used
            assert not memory.policy._holds
            assert not memory._coming

    def check(self):
        assert self.scheduler.pinned() == sum(map(len, self.plans.values()))
        for tier in MEMORY:
            memory = self.scheduler._memory[tier]
            assert 0 <= memory.evictable <= memory.used
            if not self.resizes:
                taken = self.there[tier] | {order.chunk.key for order in self.flying if order.target is tier}
                assert sum(NBYTES[key] for key in taken) <= self.budgets[tier], "more in memory than its budget"


OFTEN = ["admit"] * 4 + ["release"] * 4 + ["step"] * 5 + ["begin"] * 12 + ["end"] * 9 + ["disturb"] * 2
WITH_RESIZES = [*OFTEN, "resize"]


def test_no_budget_is_exceeded_no_pin_lost_and_nothing_left_over_in_a_hundred_thousand_operations():
    seen = Counter()
    for seed in range(OPERATIONS // OPERATIONS_EACH):
        model = Model(seed, sorted(POLICIES)[seed // 2 % len(POLICIES)])
        for operation in model.random.choices(WITH_RESIZES if model.resizes else OFTEN, k=OPERATIONS_EACH):
            getattr(model, operation)()
            model.check()
        model.settle()
        seen.update(model.seen)
    # That the operations met what they are to meet.
    assert all(seen[what] > 1_000 for what in ("load", "evict", "promotion", "given up")), seen
