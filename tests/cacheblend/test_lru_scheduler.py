"""`LruScheduler`: what it decides about one request, about advice, and at what cost."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from cacheblend_samples import identity_of, plan_of

from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.protocols import Advice
from cacheblend.scheduling.lru_scheduler import LruScheduler
from cacheblend.selectors import make_selector
from kvstore.errors import UnavailableReason
from kvstore.events import Evicted, NotStored, Published, Quarantined
from kvstore.key import ChunkKey
from kvstore.orderings import LruOrdering
from kvstore.tiers import ChunkRecord, Tier

SIZE = 100
A, B, C, D = (identity_of(i) for i in (1, 2, 3, 4))


def on_disk(*chunks):
    return [ChunkRecord(chunk.key, SIZE, len(chunk.token_ids), frozenset({Tier.DISK})) for chunk in chunks]


def on_host(*chunks):
    return [ChunkRecord(chunk.key, SIZE, len(chunk.token_ids), frozenset({Tier.DISK, Tier.HOST})) for chunk in chunks]


def published(chunk, tier=Tier.HOST, nbytes=SIZE):
    return Published(chunk.key, tier, nbytes, len(chunk.token_ids))


def evicted(chunk, tier=Tier.HOST):
    return Evicted(chunk.key, tier, SIZE)


def keys_of(evictions):
    return [eviction.key for eviction in evictions]


def arrive(scheduler, chunks):
    for chunk in chunks:
        scheduler.on_event(published(chunk))


def leave(scheduler, evictions):
    for eviction in evictions:
        scheduler.on_event(Evicted(eviction.key, Tier.HOST, SIZE))


def test_chunks_on_disk_are_loaded_and_those_on_the_host_are_not():
    scheduler = LruScheduler(1000, [*on_host(A), *on_disk(B, C)])
    admission = scheduler.admit("q", plan_of([A, B, C, B]), Policy.BLEND)
    assert admission.loads == (B, C)
    assert admission.evictions == ()
    assert admission.reason is None
    assert scheduler.host_bytes == 3 * SIZE


def test_a_load_in_flight_is_not_asked_for_again_until_it_ended():
    scheduler = LruScheduler(1000, on_disk(A))
    assert scheduler.admit("1", plan_of([A]), Policy.BLEND).loads == (A,)
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == ()
    scheduler.on_not_loaded(A.key)
    assert scheduler.host_bytes == 0
    assert scheduler.admit("3", plan_of([A]), Policy.BLEND).loads == (A,)
    arrive(scheduler, [A])
    assert scheduler.host_bytes == SIZE
    assert scheduler.admit("4", plan_of([A]), Policy.BLEND).loads == ()


def test_the_least_recently_used_chunk_leaves_for_a_load():
    scheduler = LruScheduler(2 * SIZE, [*on_host(A, B), *on_disk(C)])
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    scheduler.release("1")
    admission = scheduler.admit("2", plan_of([C]), Policy.BLEND)
    assert keys_of(admission.evictions) == [B.key]
    assert admission.evictions[0].reason == "admission"
    assert admission.loads == (C,)


def test_a_pinned_chunk_never_leaves_and_what_does_not_fit_beside_it_is_not_loaded():
    scheduler = LruScheduler(2 * SIZE, [*on_host(A, B), *on_disk(C)])
    scheduler.admit("1", plan_of([A, B]), Policy.BLEND)
    admission = scheduler.admit("2", plan_of([C]), Policy.BLEND)
    assert (admission.loads, admission.evictions) == ((), ())
    assert admission.plan.keys == (C.key,)
    scheduler.release("1")
    assert keys_of(scheduler.admit("3", plan_of([C]), Policy.BLEND).evictions) == [A.key]


def test_an_eviction_is_decided_once():
    """Until the store says so the chunk still counts, but no second decision names it."""
    scheduler = LruScheduler(2 * SIZE, [*on_host(A, B), *on_disk(C, D)])
    first = scheduler.admit("1", plan_of([C]), Policy.BLEND)
    second = scheduler.admit("2", plan_of([D]), Policy.BLEND)
    assert keys_of(first.evictions) == [A.key]
    assert A.key not in keys_of(second.evictions)
    leave(scheduler, [*first.evictions, *second.evictions])
    assert scheduler.host_bytes <= 2 * SIZE


def test_one_request_larger_than_the_budget_loads_what_fits():
    scheduler = LruScheduler(2 * SIZE, on_disk(A, B, C))
    admission = scheduler.admit("q", plan_of([A, B, C]), Policy.BLEND)
    assert admission.loads == (A, B)
    assert admission.plan.keys == (A.key, B.key, C.key)
    assert LruScheduler(0, on_disk(A)).admit("q", plan_of([A]), Policy.BLEND).loads == ()


def test_a_missing_chunk_is_fresh_with_its_reason_and_the_others_stay():
    scheduler = LruScheduler(1000, on_host(A))
    admission = scheduler.admit("q", plan_of([A, B]), Policy.BLEND)
    assert admission.plan.keys == (A.key,)
    assert admission.plan.fallback_reasons == ("missing",)
    assert admission.reason is None


def test_full_reuses_nothing_and_pins_nothing():
    scheduler = LruScheduler(1000, on_disk(A))
    admission = scheduler.admit("q", plan_of([A]), Policy.FULL)
    assert admission.plan.reused == ()
    assert admission.plan.fallback_reasons == ()
    assert (admission.loads, admission.reason, scheduler.pinned()) == ((), None, 0)


@pytest.mark.parametrize(
    ("ratio", "mode"),
    [(0.0, "blend"), (0.15, "blend"), (0.85, "blend"), (0.9, "full"), (1.0, "full")],
)
def test_auto_prefills_when_blending_would_compute_nine_tenths_of_the_rows_anyway(ratio, mode):
    """97 reusable rows and 3 of the question: 0.85 computes 85 rows of 100, 0.9 computes 90."""
    chunk = identity_of(1, 97)
    scheduler = LruScheduler(1000, on_disk(chunk))
    admission = scheduler.admit("q", plan_of([chunk], make_selector("query", ratio)), Policy.AUTO)
    if mode == "blend":
        assert admission.plan.keys == (chunk.key,)
        assert admission.reason is None
        return
    assert admission.plan.reused == ()
    assert admission.reason == "auto_full_cheaper"
    assert admission.plan.fallback_reasons == ("auto_full_cheaper",)
    assert admission.loads == ()
    assert scheduler.pinned() == 0


def test_auto_counts_fresh_rows_and_tells_missing_chunks_from_its_own_choice():
    small, large = identity_of(1, 4), identity_of(2, 96)
    scheduler = LruScheduler(1000, on_disk(small))
    admission = scheduler.admit("q", plan_of([small, large]), Policy.AUTO)
    assert admission.plan.fallback_reasons == ("auto_full_cheaper", "missing")
    nothing = scheduler.admit("r", plan_of([large]), Policy.AUTO)
    assert nothing.plan.fallback_reasons == ("missing",)
    assert nothing.reason is None


def test_the_effective_plan_is_the_same_whatever_tier_a_chunk_is_in():
    plan = plan_of([A, B], make_selector("query"))
    for policy in Policy:
        plans = [
            LruScheduler(budget, records).admit("q", plan, policy).plan
            for records in (on_host(A, B), on_disk(A, B), [*on_host(A), *on_disk(B)])
            for budget in (0, SIZE, 1000)
        ]
        assert all(each == plans[0] for each in plans)


def test_the_catalogue_follows_the_store():
    scheduler = LruScheduler(1000)
    assert scheduler.admit("1", plan_of([A]), Policy.BLEND).plan.reused == ()
    scheduler.on_event(published(A, Tier.DISK))
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == (A,)
    arrive(scheduler, [A])
    scheduler.on_event(evicted(A, Tier.DISK))
    assert scheduler.admit("3", plan_of([A]), Policy.BLEND).plan.keys == (A.key,)
    scheduler.on_event(evicted(A))
    assert scheduler.host_bytes == 0
    assert scheduler.admit("4", plan_of([A]), Policy.BLEND).plan.fallback_reasons == ("missing",)


def test_events_that_say_nothing_new_change_nothing():
    scheduler = LruScheduler(1000, on_host(A))
    scheduler.on_event(published(A))
    scheduler.on_event(evicted(B))
    scheduler.on_event(Quarantined(A.key, UnavailableReason.CHECKSUM, "its checksum does not fit"))
    scheduler.on_event(NotStored(B.key, UnavailableReason.DISK_FULL))
    assert scheduler.host_bytes == SIZE
    assert scheduler.admit("q", plan_of([A]), Policy.BLEND).plan.keys == (A.key,)


def test_a_chunk_whose_load_failed_is_not_published_any_more_unless_it_came_otherwise():
    scheduler = LruScheduler(1000, on_disk(A, B))
    scheduler.admit("1", plan_of([A, B]), Policy.BLEND)
    scheduler.on_unavailable(A.key)
    arrive(scheduler, [B])
    scheduler.on_unavailable(B.key)
    assert scheduler.host_bytes == SIZE
    admission = scheduler.admit("2", plan_of([A, B]), Policy.BLEND)
    assert admission.plan.keys == (B.key,)
    assert admission.loads == ()


def test_pins_count_requests_and_return_to_zero():
    scheduler = LruScheduler(1000, on_host(A, B))
    scheduler.admit("1", plan_of([A, B, A]), Policy.BLEND)
    scheduler.admit("2", plan_of([A]), Policy.BLEND)
    assert scheduler.pinned() == 3
    scheduler.release("1")
    scheduler.release("1")
    scheduler.release("nobody")
    assert scheduler.pinned() == 1
    scheduler.release("2")
    assert scheduler.pinned() == 0


def test_a_request_is_admitted_once_at_a_time():
    scheduler = LruScheduler(1000, on_host(A))
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    with pytest.raises(BlendError, match="'1' was admitted before"):
        scheduler.admit("1", plan_of([A]), Policy.BLEND)
    assert scheduler.pinned() == 1
    scheduler.release("1")
    scheduler.admit("1", plan_of([A]), Policy.BLEND)


def advice(*chunks):
    return [Advice(chunk, 1.0 / place) for place, chunk in enumerate(chunks, start=1)]


def test_advice_promotes_what_fits_and_evicts_only_what_nobody_wants():
    scheduler = LruScheduler(3 * SIZE, [*on_host(A, B), *on_disk(C, D)])
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    step = scheduler.step(advice(C, D))
    assert step.promotions == (C, D)
    assert keys_of(step.evictions) == [B.key]
    assert step.evictions[0].reason == "prediction"


def test_advised_chunks_do_not_push_one_another_out():
    scheduler = LruScheduler(SIZE, [*on_host(A), *on_disk(B, C)])
    step = scheduler.step(advice(A, B, C))
    assert (step.promotions, step.evictions) == ((), ())
    step = scheduler.step(advice(B, C))
    assert step.promotions == (B,)
    assert keys_of(step.evictions) == [A.key]


def test_advice_about_unknown_or_present_chunks_and_none_at_all_do_nothing():
    scheduler = LruScheduler(1000, on_host(A))
    for nothing in ([], advice(A), advice(identity_of(77))):
        step = scheduler.step(nothing)
        assert (step.promotions, step.evictions) == ((), ())


def test_a_chunk_larger_than_the_budget_evicts_nobody():
    scheduler = LruScheduler(2 * SIZE, on_host(A, B))
    scheduler.on_event(published(C, Tier.DISK, nbytes=2 * SIZE + 1))
    assert scheduler.step(advice(C)).evictions == ()
    admission = scheduler.admit("q", plan_of([C]), Policy.BLEND)
    assert (admission.loads, admission.evictions, admission.plan.keys) == ((), (), (C.key,))


class Counting(OrderedDict):
    """Counts every entry looked at, and every one passed while iterating."""

    touched = 0

    def __getitem__(self, key):
        self.touched += 1
        return super().__getitem__(key)

    def __contains__(self, key):
        self.touched += 1
        return super().__contains__(key)

    def __iter__(self):
        for key in super().__iter__():
            self.touched += 1
            yield key

    def items(self):
        for key in self:
            yield key, super().__getitem__(key)

    def values(self):
        for key in self:
            yield super().__getitem__(key)


def touches(count):
    """Entries of catalogue and ordering that each kind of call looks at, with `count` chunks on the host."""
    ordering = LruOrdering()
    ordering._nbytes = Counting()
    resident = [identity_of(1000 + i, 1) for i in range(count)]
    scheduler = LruScheduler(count * SIZE, [*on_host(*resident), *on_disk(A, B, C)], ordering)
    scheduler._catalogue._entries = Counting(scheduler._catalogue._entries)
    scheduler.on_event(published(D, Tier.DISK, nbytes=count * SIZE + 1))
    counters = (ordering._nbytes, scheduler._catalogue._entries)
    seen = {}

    def measure(name, call):
        for counter in counters:
            counter.touched = 0
        result = call()
        seen[name] = [counter.touched for counter in counters]
        return result

    plan = plan_of([resident[5], A, identity_of(77)])
    admission = measure("admit", lambda: scheduler.admit("q", plan, Policy.AUTO))
    assert len(admission.evictions) == 1
    measure("evicted", lambda: leave(scheduler, admission.evictions))
    measure("published", lambda: arrive(scheduler, admission.loads))
    assert len(measure("step", lambda: scheduler.step(advice(B, resident[6]))).evictions) == 1
    assert measure("a step about a chunk that can never fit", lambda: scheduler.step(advice(D))).promotions == ()
    measure("a step without advice", lambda: scheduler.step([]))
    measure("not loaded", lambda: scheduler.on_not_loaded(B.key))
    measure("unavailable", lambda: scheduler.on_unavailable(C.key))
    measure("release", lambda: scheduler.release("q"))
    return seen


def test_the_work_of_a_call_does_not_grow_with_the_number_of_chunks():
    few, many = touches(10), touches(10_000)
    assert few == many
    assert sum(map(sum, few.values())) > 0


def test_chunks_put_while_the_scheduler_takes_the_store_over_are_counted_once():
    record = ChunkRecord(ChunkKey("k"), 10, 1, frozenset({Tier.HOST}))
    scheduler = LruScheduler(100)
    scheduler.on_event(Published(record.key, Tier.HOST, 10, 1))
    scheduler.take_over([record])
    scheduler.on_event(Published(record.key, Tier.HOST, 10, 1))
    assert scheduler.host_bytes == 10
