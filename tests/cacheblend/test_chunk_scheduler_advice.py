"""`ChunkScheduler` and advice: what it moves, whom it spares, and for how long."""

from __future__ import annotations

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
    on_disk,
    on_host,
    scheduler_of,
    to_host,
)

from cacheblend.plan import Policy
from cacheblend.protocols import Advice, SchedulerStep
from cacheblend.scheduling.chunk_scheduler import ADVISED_KNOWN, EVICTING_CONFIDENCE, ChunkScheduler
from kvstore.eviction import LruPolicy
from kvstore.tiers import Tier


def test_advice_promotes_what_fits_and_evicts_only_what_nobody_wants():
    scheduler = scheduler_of(3 * SIZE, [*on_host(A, B), *on_disk(C, D)])
    scheduler.admit("1", plan_of([A]), Policy.BLEND)
    step = scheduler.step(advice(C, D))
    assert step.promotions == to_host(C, D)
    assert keys_of(step.evictions) == [B.key]
    assert step.evictions[0].reason == "prediction"


def test_advised_chunks_do_not_push_one_another_out():
    scheduler = scheduler_of(SIZE, [*on_host(A), *on_disk(B, C)])
    step = scheduler.step(advice(A, B, C))
    assert (step.promotions, step.evictions) == ((), ())
    step = scheduler.step(advice(B, C))
    assert step.promotions == to_host(B)
    assert keys_of(step.evictions) == [A.key]


def test_advice_about_unknown_or_present_chunks_and_none_at_all_do_nothing():
    scheduler = scheduler_of(1000, on_host(A))
    for nothing in ([], advice(A), advice(identity_of(77))):
        step = scheduler.step(nothing)
        assert (step.promotions, step.evictions) == ((), ())


class NotesAdvice(LruPolicy):
    """Notes what is expected of each chunk."""

    def __init__(self):
        super().__init__()
        self.expected = []

    def expect(self, key, confidence):
        self.expected.append((key, confidence))


def noting_advice(records, gpu=0):
    """A scheduler, and what its policies for the host and the GPU are told to expect."""
    made = []

    def policy():
        made.append(NotesAdvice())
        return made[-1]

    scheduler = ChunkScheduler({Tier.HOST: 1000, Tier.GPU: gpu}, records, policy)
    gpu_policy, host_policy = made
    return scheduler, host_policy.expected, gpu_policy.expected


def test_a_policy_hears_of_advice_when_it_changes_and_when_the_chunk_comes():
    scheduler, told, told_of_gpu = noting_advice([*on_host(A), *on_disk(B)])
    scheduler.step([Advice(A, 0.3), Advice(B, float("nan")), Advice(C, 1.0)])
    assert told == [(A.key, 0.3)]
    scheduler.step([Advice(A, 0.3), Advice(B, 9.0)])
    assert told == [(A.key, 0.3)]
    arrive(scheduler, [B])
    assert told[1:] == [(B.key, 1.0)]
    scheduler.step([Advice(A, 0.2)])
    assert told[2:] == [(A.key, 0.2)]
    assert told_of_gpu == []


def test_advice_holds_over_steps_without_it():
    """A is expected at its place from when it was said, and again when it comes back from having left."""
    scheduler, told, _ = noting_advice([*on_host(A), *on_disk(B)])
    scheduler.step([Advice(A, 0.3), Advice(B, 0.6)])
    for _ in range(100):
        assert scheduler.step([]) == SchedulerStep()
        scheduler.step([Advice(D, 0.5)])
    arrive(scheduler, [B])
    scheduler.on_event(evicted(A))
    arrive(scheduler, [A])
    assert told == [(A.key, 0.3), (B.key, 0.6), (A.key, 0.3)]


def test_advice_keeps_a_chunk_until_it_is_taken_back():
    """Of two chunks that are alike, the older one leaves first, unless it is expected."""
    for taken_back, leaves in (([], B), ([Advice(A, 0.0)], A)):
        scheduler = ChunkScheduler({Tier.HOST: 2 * SIZE}, [*on_host(A), *on_disk(C)])
        scheduler.step([Advice(A, 0.5)])
        scheduler.step(taken_back)
        for _ in range(100):
            scheduler.step([])
        arrive(scheduler, [B])
        assert keys_of(scheduler.admit("q", plan_of([C]), Policy.BLEND).evictions) == [leaves.key]


def test_advice_of_no_confidence_takes_a_piece_back_in_every_tier_and_moves_nothing():
    scheduler, told, told_of_gpu = noting_advice([*everywhere(A), *on_disk(B, C)], gpu=1000)
    scheduler.step([Advice(A, 0.3), Advice(B, 0.4)])
    step = scheduler.step([Advice(A, 0.0), Advice(B, 0.0), Advice(C, 0.0), Advice(D, 0.0)])
    assert step == SchedulerStep()
    arrive(scheduler, [B])
    assert told == told_of_gpu == [(A.key, 0.3), (A.key, 0.0)]


def test_what_is_taken_back_is_not_kept_from_leaving_for_other_advice_of_the_same_step():
    scheduler = scheduler_of(SIZE, [*on_host(A), *on_disk(B)])
    scheduler.step([Advice(A, 0.9)])
    step = scheduler.step([Advice(B, 0.5), Advice(A, 0.0)])
    assert (step.promotions, keys_of(step.evictions)) == (to_host(B), [A.key])


def test_of_more_advice_than_is_remembered_the_oldest_is_taken_back():
    scheduler, told, _ = noting_advice(on_host(A, B))
    scheduler.step([Advice(A, 0.3), Advice(B, 0.3)])
    others = [identity_of(seed) for seed in range(100, 100 + ADVISED_KNOWN - 2)]
    scheduler.step([Advice(chunk, 0.3) for chunk in others])
    # A is said again, and so is not the oldest any more.
    scheduler.step([Advice(A, 0.3)])
    assert told == [(A.key, 0.3), (B.key, 0.3)]
    scheduler.step([Advice(C, 0.3)])
    assert told[2:] == [(B.key, 0.0)]
    scheduler.step([Advice(identity_of(seed), 0.3) for seed in range(5_000, 5_000 + 3 * ADVISED_KNOWN)])
    assert told[3:] == [(A.key, 0.0)]
    assert len(scheduler._advised) == ADVISED_KNOWN


def test_weak_advice_takes_free_room_and_has_nobody_leave():
    weak = EVICTING_CONFIDENCE - 0.01
    scheduler = scheduler_of(2 * SIZE, [*on_host(A), *on_disk(B, C)])
    step = scheduler.step([Advice(B, weak), Advice(C, weak)])
    assert (step.promotions, step.evictions) == (to_host(B), ())
    step = scheduler.step([Advice(C, EVICTING_CONFIDENCE)])
    assert (step.promotions, keys_of(step.evictions)) == (to_host(C), [A.key])


def test_a_request_may_push_out_what_is_only_advised():
    scheduler = scheduler_of(SIZE, [*on_host(A), *on_disk(B)])
    scheduler.step([Advice(A, 1.0)])
    assert scheduler.admit("q", plan_of([B]), Policy.BLEND).loads == to_host(B)
