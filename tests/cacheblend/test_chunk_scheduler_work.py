"""What a call of `ChunkScheduler` looks at, counted: it grows with what changes, never with what there is."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
from cacheblend_samples import identity_of, plan_of

from cacheblend.plan import Policy
from cacheblend.protocols import Advice
from cacheblend.scheduling.catalogue import Catalogue
from cacheblend.scheduling.chunk_scheduler import ADVISED_KNOWN, ChunkScheduler
from kvstore.events import Evicted, Published
from kvstore.eviction import GdsfPolicy
from kvstore.key import ChunkKey
from kvstore.tiers import ChunkRecord, Tier

SIZE = 100
WANTED = [identity_of(seed) for seed in range(1, 11)]
ADVISED = [identity_of(seed) for seed in range(11, 27)]
MOST_PER_CHANGE = 12
"""Records and policy calls for each chunk that a call names or moves, the most."""


def counting(kind):
    """A dict class that counts the entries looked at, those passed while iterating among them."""

    class Counting(kind):
        touched = 0

    def counted(name):
        def call(self, *arguments, **named):
            self.touched += 1
            return getattr(super(Counting, self), name)(*arguments, **named)

        return call

    def walked(name):
        def call(self):
            for entry in getattr(super(Counting, self), name)():
                self.touched += 1
                yield entry

        return call

    for name in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "popitem"):
        setattr(Counting, name, counted(name))
    for name in ("__iter__", "keys", "values", "items"):
        setattr(Counting, name, walked(name))
    return Counting


CountingDict, CountingOrderedDict, CountingCatalogue = counting(dict), counting(OrderedDict), counting(Catalogue)


def record(key, *tiers):
    return ChunkRecord(key, SIZE, 4, frozenset(tiers))


class CountingPolicy:
    """Counts calls, and the chunks that come out of them."""

    def __init__(self):
        self._policy = GdsfPolicy()
        self.touched = 0

    def __getattr__(self, name):
        def counted(*arguments):
            result = getattr(self._policy, name)(*arguments)
            self.touched += 1 + len(result or ())
            return result

        return counted


class Counted:
    """A scheduler whose records are counted. Its host memory is full of `count` chunks and of half as many loads in
    flight, which as many requests have pinned; its GPU is full of half of the chunks."""

    def __init__(self, count):
        self.policies = []
        half = count // 2
        self.host_budget = (count + half) * SIZE

        def policy():
            self.policies.append(CountingPolicy())
            return self.policies[-1]

        coming = [identity_of(seed) for seed in range(100, 100 + half)]
        on_disk = [record(chunk.key, Tier.DISK) for chunk in (*WANTED, *ADVISED, *coming)]
        self.scheduler = ChunkScheduler({Tier.HOST: half * SIZE}, on_disk, policy)
        for place, chunk in enumerate(coming):
            assert self.scheduler.admit(f"before-{place}", plan_of([chunk]), Policy.BLEND).loads
        self.scheduler.set_budget(Tier.HOST, self.host_budget)
        self.scheduler.set_budget(Tier.GPU, half * SIZE)
        resident = [ChunkKey(f"resident-{index}") for index in range(count)]
        self.scheduler.take_over(record(key, *Tier) for key in resident[:half])
        self.scheduler.take_over(record(key, Tier.DISK, Tier.HOST) for key in resident[half:])
        assert self.scheduler.used_bytes(Tier.HOST) == self.host_budget
        self.catalogue = CountingCatalogue(self.scheduler._catalogue)
        self.scheduler._catalogue = self.catalogue
        self.books = [CountingDict(self.scheduler._pins), CountingDict(self.scheduler._requests)]
        self.scheduler._pins, self.scheduler._requests = self.books
        self.scheduler._advised = CountingOrderedDict(self.scheduler._advised)
        self.books.append(self.scheduler._advised)
        for memory in (self.scheduler._gpu, self.scheduler._host):
            memory._catalogue = self.catalogue
            memory._coming = CountingDict(memory._coming)
            self.books.append(memory._coming)

    def touched_by(self, call, *arguments):
        """What the call returns, and the records it looked at."""
        counters = (self.catalogue, *self.policies, *self.books)
        before = sum(counter.touched for counter in counters)
        result = call(*arguments)
        return result, sum(counter.touched for counter in counters) - before

    def follow(self, decision, loads):
        """Carry a decision out: records looked at, and events."""
        events = [Evicted(eviction.key, eviction.tier, SIZE) for eviction in decision.evictions]
        events += [Published(order.chunk.key, order.target, SIZE, 4) for order in loads]
        return sum(self.touched_by(self.scheduler.on_event, event)[1] for event in events), len(events)


def measured(count):
    """By call: changes and records touched."""
    counted = Counted(count)
    scheduler = counted.scheduler
    seen = {}
    admission, touched = counted.touched_by(scheduler.admit, "q", plan_of(WANTED), Policy.BLEND)
    seen["admit"] = len(WANTED) + len(admission.evictions), touched
    assert len(admission.loads) == len(WANTED)
    touched, events = counted.follow(admission, admission.loads)
    seen["events"] = events, touched
    scheduler.release("q")
    again, touched = counted.touched_by(scheduler.admit, "r", plan_of(WANTED), Policy.BLEND)
    seen["admit what is on the host"] = len(WANTED) + len(again.evictions), touched
    _, touched = counted.touched_by(scheduler.release, "r")
    seen["release"] = len(WANTED), touched
    counted.follow(again, again.promotions)
    advice = [Advice(chunk, 1.0 - place / 100) for place, chunk in enumerate(ADVISED)]
    for turn in ("cold advice", "the same advice"):
        step, touched = counted.touched_by(scheduler.step, advice)
        seen[turn] = len(advice) + len(step.evictions), touched
        counted.follow(step, step.promotions)
    _, touched = counted.touched_by(scheduler.step, [])
    seen["nothing new"] = 0, touched
    strangers = [Advice(identity_of(seed), 0.3) for seed in range(200_000, 200_000 + ADVISED_KNOWN)]
    _, touched = counted.touched_by(scheduler.step, strangers)
    seen["advice that has the first forgotten"] = 2 * len(strangers), touched
    _, touched = counted.touched_by(scheduler.step, [Advice(piece.chunk, 0.0) for piece in strangers])
    seen["advice taken back"] = len(strangers), touched
    _, touched = counted.touched_by(scheduler.step, [])
    seen["nothing at all"] = 0, touched
    evictions, touched = counted.touched_by(scheduler.set_budget, Tier.HOST, counted.host_budget - 5 * SIZE)
    seen["a smaller budget"] = len(evictions), touched
    return seen


@pytest.mark.parametrize("count", [10, 100, 1_000, 10_000, 100_000])
def test_records_touched_are_at_most_a_constant_times_changes_times_the_logarithm_of_all(count):
    for call, (changes, touched) in measured(count).items():
        assert touched <= MOST_PER_CHANGE * changes * math.log2(count), call


def test_a_step_without_change_touches_nothing():
    seen = measured(1_000)
    assert seen["nothing new"] == seen["nothing at all"] == (0, 0)


def test_a_hundred_times_the_chunks_touch_no_more_records():
    few, many = measured(100), measured(10_000)
    assert few == many
    assert few["admit"][1] > len(WANTED)
