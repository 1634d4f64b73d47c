"""`ChunkScheduler`: what it decides about requests, about what the store tells, and under which budgets."""

from __future__ import annotations

import pytest
from cacheblend_samples import identity_of, plan_of
from chunk_scheduler_samples import (
    SIZE,
    A,
    B,
    C,
    D,
    advice,
    arrive,
    everywhere,
    evicted,
    keys_of,
    leave,
    on_disk,
    on_host,
    published,
    scheduler_of,
    to_gpu,
    to_host,
)

from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.protocols import Advice
from cacheblend.scheduling.chunk_scheduler import GPU_CONFIDENCE
from cacheblend.selectors import make_selector
from kvstore.errors import UnavailableReason
from kvstore.events import NotStored, Published, Quarantined
from kvstore.key import ChunkKey
from kvstore.tiers import ChunkRecord, Tier


def test_chunks_on_disk_are_loaded_and_those_on_the_host_are_not():
    scheduler = scheduler_of(1000, [*on_host(A), *on_disk(B, C)])
    admission = scheduler.admit("q", plan_of([A, B, C, B]), Policy.BLEND)
    assert admission.loads == to_host(B, C)
    assert admission.evictions == ()
    assert admission.reason is None
    assert scheduler.used_bytes(Tier.HOST) == 3 * SIZE


def test_a_load_in_flight_is_not_asked_for_again_until_it_ended():
    scheduler = scheduler_of(1000, on_disk(A))
    assert scheduler.admit("1", plan_of([A]), Policy.BLEND).loads == to_host(A)
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == ()
    scheduler.on_not_loaded(A.key)
    assert scheduler.used_bytes(Tier.HOST) == 0
    assert scheduler.admit("3", plan_of([A]), Policy.BLEND).loads == to_host(A)
    arrive(scheduler, [A])
    assert scheduler.used_bytes(Tier.HOST) == SIZE
    assert scheduler.admit("4", plan_of([A]), Policy.BLEND).loads == ()


def test_the_least_recently_used_chunk_leaves_for_a_load():
    scheduler = scheduler_of(2 * SIZE, [*on_host(A, B), *on_disk(C)])
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    scheduler.release("1")
    admission = scheduler.admit("2", plan_of([C]), Policy.BLEND)
    assert keys_of(admission.evictions) == [B.key]
    assert admission.evictions[0].reason == "admission"
    assert admission.loads == to_host(C)


def test_a_pinned_chunk_never_leaves_and_what_does_not_fit_beside_it_is_not_loaded():
    scheduler = scheduler_of(2 * SIZE, [*on_host(A, B), *on_disk(C)])
    scheduler.admit("1", plan_of([A, B]), Policy.BLEND)
    admission = scheduler.admit("2", plan_of([C]), Policy.BLEND)
    assert (admission.loads, admission.evictions) == ((), ())
    assert admission.plan.keys == (C.key,)
    scheduler.release("1")
    assert keys_of(scheduler.admit("3", plan_of([C]), Policy.BLEND).evictions) == [A.key]


def test_a_pinned_chunk_that_was_lost_and_came_back_stays_until_released_and_may_leave_then():
    scheduler = scheduler_of(SIZE, [*on_host(A), *on_disk(B)])
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    scheduler.on_event(evicted(A))
    scheduler.on_event(published(A))
    assert scheduler.admit("2", plan_of([B]), Policy.BLEND).loads == ()
    scheduler.release("1")
    assert keys_of(scheduler.admit("3", plan_of([B]), Policy.BLEND).evictions) == [A.key]


def test_a_chunk_that_is_released_while_it_is_away_may_leave_when_it_is_back():
    scheduler = scheduler_of(SIZE, [*on_host(A), *on_disk(B)])
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    scheduler.on_event(evicted(A))
    scheduler.release("1")
    scheduler.on_event(published(A))
    assert keys_of(scheduler.admit("2", plan_of([B]), Policy.BLEND).evictions) == [A.key]


def test_an_eviction_is_decided_once_and_counts_from_then_on():
    """What was ordered to leave takes no room and is named by no second decision, whatever the store has done yet."""
    scheduler = scheduler_of(2 * SIZE, [*on_host(A, B), *on_disk(C, D)])
    first = scheduler.admit("1", plan_of([C]), Policy.BLEND)
    second = scheduler.admit("2", plan_of([D]), Policy.BLEND)
    assert keys_of(first.evictions) == [A.key]
    assert keys_of(second.evictions) == [B.key]
    assert second.loads == to_host(D)
    leave(scheduler, [*first.evictions, *second.evictions])
    assert scheduler.used_bytes(Tier.HOST) <= 2 * SIZE


def test_one_request_larger_than_the_budget_loads_what_fits():
    scheduler = scheduler_of(2 * SIZE, on_disk(A, B, C))
    admission = scheduler.admit("q", plan_of([A, B, C]), Policy.BLEND)
    assert admission.loads == to_host(A, B)
    assert admission.plan.keys == (A.key, B.key, C.key)
    assert scheduler_of(0, on_disk(A)).admit("q", plan_of([A]), Policy.BLEND).loads == ()


def test_a_missing_chunk_is_fresh_with_its_reason_and_the_others_stay():
    scheduler = scheduler_of(1000, on_host(A))
    admission = scheduler.admit("q", plan_of([A, B]), Policy.BLEND)
    assert admission.plan.keys == (A.key,)
    assert admission.plan.fallback_reasons == ("missing",)
    assert admission.reason is None


def test_full_reuses_nothing_and_pins_nothing():
    scheduler = scheduler_of(1000, on_disk(A))
    admission = scheduler.admit("q", plan_of([A]), Policy.FULL)
    assert admission.plan.reused == ()
    assert admission.plan.fallback_reasons == ()
    assert (admission.loads, admission.reason, scheduler.pinned()) == ((), None, 0)


@pytest.mark.parametrize("name", ["full", "query", "deviation", "chunk_head+query"])
def test_a_blend_that_recomputes_everything_has_nothing_loaded_pinned_or_evicted_whatever_becomes_of_its_chunks(name):
    scheduler = scheduler_of(SIZE, [*on_host(A), *on_disk(B)], gpu=SIZE)
    plan = plan_of([A, B], make_selector(name, 1.0))
    admission = scheduler.admit("q", plan, Policy.BLEND)
    assert (admission.plan, admission.loads, admission.evictions, admission.promotions) == (plan, (), (), ())
    assert (scheduler.pinned(), scheduler.used_bytes(Tier.GPU)) == (0, 0)
    # Its chunk leaves for another request at once.
    assert keys_of(scheduler.admit("other", plan_of([B]), Policy.BLEND).evictions) == [A.key]
    scheduler.release("q")
    assert scheduler.pinned() == 1


def test_a_blend_that_recomputes_everything_still_names_the_chunks_that_are_missing():
    scheduler = scheduler_of(SIZE, on_disk(A))
    admission = scheduler.admit("q", plan_of([A, B], make_selector("full")), Policy.BLEND)
    assert (admission.plan.keys, admission.plan.fallback_reasons) == ((A.key,), ("missing",))


@pytest.mark.parametrize(
    ("ratio", "mode"),
    [(0.0, "blend"), (0.15, "blend"), (0.83, "blend"), (0.85, "full"), (1.0, "full")],
)
def test_auto_prefills_when_blending_would_compute_about_six_sevenths_of_the_rows_anyway(ratio, mode):
    """97 reusable rows and 3 of the question: 0.83 computes 84 rows of 100, 0.85 computes 85."""
    chunk = identity_of(1, 97)
    scheduler = scheduler_of(1000, on_disk(chunk))
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
    scheduler = scheduler_of(1000, on_disk(small))
    admission = scheduler.admit("q", plan_of([small, large]), Policy.AUTO)
    assert admission.plan.fallback_reasons == ("auto_full_cheaper", "missing")
    nothing = scheduler.admit("r", plan_of([large]), Policy.AUTO)
    assert nothing.plan.fallback_reasons == ("missing",)
    assert nothing.reason is None


def test_the_effective_plan_is_the_same_whatever_tier_a_chunk_is_in():
    plan = plan_of([A, B], make_selector("query"))
    for policy in Policy:
        plans = [
            scheduler_of(budget, records).admit("q", plan, policy).plan
            for records in (on_host(A, B), on_disk(A, B), [*on_host(A), *on_disk(B)])
            for budget in (0, SIZE, 1000)
        ]
        assert all(each == plans[0] for each in plans)


def test_the_catalogue_follows_the_store():
    scheduler = scheduler_of(1000)
    assert scheduler.admit("1", plan_of([A]), Policy.BLEND).plan.reused == ()
    scheduler.on_event(published(A, Tier.DISK))
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == to_host(A)
    arrive(scheduler, [A])
    scheduler.on_event(evicted(A, Tier.DISK))
    assert scheduler.admit("3", plan_of([A]), Policy.BLEND).plan.keys == (A.key,)
    scheduler.on_event(evicted(A))
    assert scheduler.used_bytes(Tier.HOST) == 0
    assert scheduler.admit("4", plan_of([A]), Policy.BLEND).plan.fallback_reasons == ("missing",)


def test_events_that_say_nothing_new_change_nothing():
    scheduler = scheduler_of(1000, on_host(A))
    scheduler.on_event(published(A))
    scheduler.on_event(evicted(B))
    scheduler.on_event(Quarantined(A.key, UnavailableReason.CHECKSUM, "its checksum does not fit"))
    scheduler.on_event(NotStored(B.key, UnavailableReason.DISK_FULL))
    assert scheduler.used_bytes(Tier.HOST) == SIZE
    assert scheduler.admit("q", plan_of([A]), Policy.BLEND).plan.keys == (A.key,)


def test_a_chunk_whose_load_failed_is_not_published_any_more_unless_it_came_otherwise():
    scheduler = scheduler_of(1000, on_disk(A, B))
    scheduler.admit("1", plan_of([A, B]), Policy.BLEND)
    scheduler.on_unavailable(A.key)
    arrive(scheduler, [B])
    scheduler.on_unavailable(B.key)
    assert scheduler.used_bytes(Tier.HOST) == SIZE
    admission = scheduler.admit("2", plan_of([A, B]), Policy.BLEND)
    assert admission.plan.keys == (B.key,)
    assert admission.loads == ()


def test_pins_count_requests_and_return_to_zero():
    scheduler = scheduler_of(1000, on_host(A, B))
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
    scheduler = scheduler_of(1000, on_host(A))
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    with pytest.raises(BlendError, match="'1' was admitted before"):
        scheduler.admit("1", plan_of([A]), Policy.BLEND)
    assert scheduler.pinned() == 1
    scheduler.release("1")
    scheduler.admit("1", plan_of([A]), Policy.BLEND)


def test_a_chunk_larger_than_the_budget_evicts_nobody():
    scheduler = scheduler_of(2 * SIZE, on_host(A, B))
    scheduler.on_event(published(C, Tier.DISK, nbytes=2 * SIZE + 1))
    assert scheduler.step(advice(C)).evictions == ()
    admission = scheduler.admit("q", plan_of([C]), Policy.BLEND)
    assert (admission.loads, admission.evictions, admission.plan.keys) == ((), (), (C.key,))


def test_chunks_put_while_the_scheduler_takes_the_store_over_are_counted_once():
    record = ChunkRecord(ChunkKey("k"), 10, 1, frozenset({Tier.HOST}))
    scheduler = scheduler_of(100)
    scheduler.on_event(Published(record.key, Tier.HOST, 10, 1))
    scheduler.take_over([record])
    scheduler.on_event(Published(record.key, Tier.HOST, 10, 1))
    assert scheduler.used_bytes(Tier.HOST) == 10


def test_what_was_ordered_to_leave_memory_for_good_is_missing_at_once():
    scheduler = scheduler_of(SIZE, on_disk(A))
    scheduler.on_event(published(B))
    assert keys_of(scheduler.admit("1", plan_of([A]), Policy.BLEND).evictions) == [B.key]
    assert scheduler.admit("2", plan_of([B]), Policy.BLEND).plan.fallback_reasons == ("missing",)


def test_a_chunk_ordered_to_leave_can_be_ordered_back_before_it_has_left():
    scheduler = scheduler_of(SIZE, [*on_host(A), *on_disk(B)])
    scheduler.admit("1", plan_of([B]), Policy.BLEND)
    scheduler.release("1")
    scheduler.on_not_loaded(B.key)
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == to_host(A)
    scheduler.on_event(evicted(A))
    assert scheduler.used_bytes(Tier.HOST) == SIZE
    arrive(scheduler, [A])
    assert scheduler.used_bytes(Tier.HOST) == SIZE
    assert scheduler.admit("3", plan_of([A]), Policy.BLEND).loads == ()


def test_a_load_that_found_the_chunk_there_leaves_nothing_on_its_way():
    scheduler = scheduler_of(SIZE, on_disk(A))
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    scheduler.on_not_loaded(A.key)
    assert scheduler.used_bytes(Tier.HOST) == 0
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == to_host(A)


# The GPU tier


def test_an_admitted_requests_chunks_go_from_the_host_to_the_gpu_for_whoever_wants_them_next():
    scheduler = scheduler_of(1000, [*on_host(A), *on_disk(B), *everywhere(C)], gpu=1000)
    admission = scheduler.admit("1", plan_of([A, B, C]), Policy.BLEND)
    assert (admission.loads, admission.promotions) == (to_host(B), to_gpu(A))
    assert scheduler.used_bytes(Tier.GPU) == 2 * SIZE
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).promotions == ()
    scheduler.on_event(published(A, Tier.GPU))
    assert scheduler.used_bytes(Tier.GPU) == 2 * SIZE
    assert scheduler.admit("3", plan_of([A]), Policy.BLEND).promotions == ()
    scheduler.on_event(evicted(A, Tier.GPU))
    assert scheduler.admit("4", plan_of([A]), Policy.BLEND).promotions == to_gpu(A)


def test_only_what_fits_beside_what_is_pinned_goes_to_the_gpu_and_never_what_is_larger_than_it():
    scheduler = scheduler_of(1000, [*everywhere(A), *on_host(B, C)], gpu=2 * SIZE)
    assert scheduler.admit("1", plan_of([A, B, C]), Policy.BLEND).promotions == to_gpu(B)
    tight = scheduler_of(1000, on_host(A), gpu=SIZE - 1)
    assert tight.admit("1", plan_of([A]), Policy.BLEND).promotions == ()
    assert tight.step([Advice(A, 1.0)]).promotions == ()


def test_leaving_the_gpu_takes_nothing_from_the_host_and_being_on_it_neither():
    scheduler = scheduler_of(2 * SIZE, [*everywhere(A), *on_host(B)], gpu=SIZE)
    admission = scheduler.admit("1", plan_of([B]), Policy.BLEND)
    assert [(eviction.key, eviction.tier) for eviction in admission.evictions] == [(A.key, Tier.GPU)]
    assert scheduler.used_bytes(Tier.HOST) == 2 * SIZE
    scheduler.on_event(evicted(A, Tier.GPU))
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == ()


def test_what_is_on_the_gpu_alone_is_used_from_there():
    scheduler = scheduler_of(1000, gpu=1000)
    scheduler.on_event(published(A, Tier.GPU))
    admission = scheduler.admit("1", plan_of([A]), Policy.BLEND)
    assert (admission.plan.keys, admission.loads, admission.promotions) == ((A.key,), (), ())


def test_advice_takes_the_gpu_only_with_confidence_and_only_from_the_host():
    scheduler = scheduler_of(1000, [*on_host(A, B), *on_disk(C)], gpu=1000)
    step = scheduler.step([Advice(A, GPU_CONFIDENCE), Advice(B, GPU_CONFIDENCE - 0.01), Advice(C, 1.0)])
    assert step.promotions == (*to_gpu(A), *to_host(C))
    assert scheduler.step([Advice(A, 1.0)]).promotions == ()


def test_a_load_to_the_gpu_that_did_not_come_gives_only_that_room_back():
    scheduler = scheduler_of(1000, on_host(A), gpu=1000)
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    scheduler.on_not_loaded(A.key, Tier.GPU)
    assert (scheduler.used_bytes(Tier.GPU), scheduler.used_bytes(Tier.HOST)) == (0, SIZE)
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).promotions == to_gpu(A)


# Budgets that change


def test_a_smaller_budget_evicts_at_once_what_is_free_and_the_rest_as_pins_go():
    scheduler = scheduler_of(4 * SIZE, on_host(A, B, C))
    scheduler.admit("1", plan_of([A, B]), Policy.BLEND)
    evictions = scheduler.set_budget(Tier.HOST, SIZE)
    assert [(eviction.key, eviction.reason, eviction.tier) for eviction in evictions] == [(C.key, "budget", Tier.HOST)]
    assert scheduler.step([]).evictions == ()
    scheduler.release("1")
    assert keys_of(scheduler.step([]).evictions) == [A.key]
    assert scheduler.used_bytes(Tier.HOST) == scheduler.budget_bytes(Tier.HOST) == SIZE
    assert scheduler.step([]).evictions == ()


def test_what_was_on_its_way_when_the_budget_shrank_leaves_after_it_came():
    scheduler = scheduler_of(1000, on_disk(A))
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    assert scheduler.set_budget(Tier.HOST, 0) == ()
    arrive(scheduler, [A])
    scheduler.release("1")
    assert keys_of(scheduler.step([]).evictions) == [A.key]


def test_a_larger_budget_is_used_from_the_next_decision_on():
    scheduler = scheduler_of(0, on_host(), gpu=0)
    scheduler.on_event(published(A, Tier.DISK))
    assert scheduler.admit("1", plan_of([A]), Policy.BLEND).loads == ()
    assert scheduler.set_budget(Tier.HOST, SIZE) == scheduler.set_budget(Tier.GPU, SIZE) == ()
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == to_host(A)
    arrive(scheduler, [A])
    assert scheduler.admit("3", plan_of([A]), Policy.BLEND).promotions == to_gpu(A)


@pytest.mark.parametrize(("tier", "nbytes"), [(Tier.DISK, 10), (Tier.REMOTE, 10), (Tier.HOST, -1)])
def test_a_budget_that_makes_no_sense_is_refused(tier, nbytes):
    with pytest.raises(BlendError, match=tier.value):
        scheduler_of(1000).set_budget(tier, nbytes)
