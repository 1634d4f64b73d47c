"""`ChunkScheduler` and costs: when `auto` prefills, and what a chunk is worth keeping for."""

from __future__ import annotations

import pytest
from cacheblend_samples import plan_of
from chunk_scheduler_samples import (
    SIZE,
    A,
    B,
    C,
    everywhere,
    on_disk,
    on_host,
    scheduler_of,
)

from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.protocols import Advice
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.scheduling.cost_model import CostModel
from kvstore.eviction import LruPolicy
from kvstore.tiers import ChunkRecord, Tier


def costs(disk=10.0, rows=10.0, squared=0.0):
    """A chunk of `SIZE` bytes and 4 tokens takes 10 s from disk and 0.4 s to compute."""
    return CostModel({Tier.HOST: 1e4, Tier.DISK: disk}, {Tier.DISK: 0.0}, rows, squared)


def test_auto_prefills_what_would_load_more_slowly_and_says_so():
    """7 rows: 0.7 s to prefill. From the host 0.01 s and 0.3 s for the question; from the disk 10 s."""
    for records, mode in ((on_host(A), "blend"), (on_disk(A), "full"), (everywhere(A), "blend")):
        scheduler = scheduler_of(1000, records, costs=costs())
        admission = scheduler.admit("q", plan_of([A]), Policy.AUTO)
        assert admission.reason == (None if mode == "blend" else "auto_load_slower")
        assert bool(admission.plan.reused) == (mode == "blend")
        if mode == "full":
            assert admission.plan.fallback_reasons == ("auto_load_slower",)
            assert (admission.loads, admission.promotions, scheduler.pinned()) == ((), (), 0)


def test_auto_compares_loading_and_recomputing_together_with_prefilling():
    """0.7 s to prefill against the question's 0.3 s and the load: worth it up to 0.4 s."""
    for disk, blends in ((SIZE / 0.39, True), (SIZE / 0.41, False)):
        scheduler = scheduler_of(1000, on_disk(A), costs=costs(disk))
        assert bool(scheduler.admit("q", plan_of([A]), Policy.AUTO).plan.reused) == blends


def test_costs_can_come_later_and_count_from_then_on():
    scheduler = scheduler_of(1000, on_disk(A))
    assert scheduler.admit("1", plan_of([A]), Policy.AUTO).reason is None
    scheduler.on_not_loaded(A.key)
    scheduler.calibrate(costs())
    assert scheduler.admit("2", plan_of([A]), Policy.AUTO).reason == "auto_load_slower"


def test_blend_is_blended_however_slow_the_load_and_whatever_is_advised():
    for records in (on_host(A, B), on_disk(A, B), everywhere(A, B)):
        for pieces in ([], [Advice(A, 1.0)]):
            scheduler = scheduler_of(SIZE, records, gpu=SIZE, costs=costs(disk=1e-6))
            scheduler.step(pieces)
            admission = scheduler.admit("q", plan_of([A, B]), Policy.BLEND)
            assert (admission.plan, admission.reason) == (plan_of([A, B]), None)


class NotesCosts(LruPolicy):
    """Notes what each chunk is said to cost."""

    def __init__(self):
        super().__init__()
        self.costs = {}

    def add(self, key, nbytes, cost_s=0.0):
        super().add(key, nbytes, cost_s)
        self.costs[key] = cost_s


def test_a_chunk_costs_the_cheaper_of_the_next_tier_and_computing_it():
    """From the host 0.01 s, from the disk 10 or 0.1 s, computed 0.4 s."""
    made = []

    def policy():
        made.append(NotesCosts())
        return made[-1]

    records = [*everywhere(A), *on_host(B), ChunkRecord(C.key, SIZE, 4, frozenset({Tier.HOST}))]
    for disk, from_disk in ((10.0, 0.4), (1000.0, 0.1)):
        made.clear()
        ChunkScheduler({Tier.HOST: 1000, Tier.GPU: 1000}, records, policy, costs(disk))
        gpu, host = made
        assert gpu.costs == {A.key: pytest.approx(0.01)}
        assert host.costs == {key: pytest.approx(from_disk) for key in (A.key, B.key)} | {C.key: pytest.approx(0.4)}
    ChunkScheduler({Tier.HOST: 1000}, records, policy)
    assert set(made[-1].costs.values()) == {0.0}


def test_seconds_follow_from_measured_rates():
    model = CostModel({Tier.HOST: 100.0, Tier.DISK: 10.0}, {Tier.DISK: 0.5}, 10.0, 0.01)
    assert model.load_seconds({Tier.HOST: 50, Tier.DISK: 20, Tier.GPU: 99, Tier.REMOTE: 99}) == pytest.approx(3.0)
    assert model.load_seconds({Tier.DISK: 0}) == 0.0
    assert model.prefill_seconds(10, 0) == pytest.approx(1.5)
    assert model.prefill_seconds(10, 20) == pytest.approx(3.5)
    assert model.recompute_seconds(10, 10) == model.prefill_seconds(10, 0)
    assert model.prefill_seconds(4, 0) + model.prefill_seconds(6, 4) == pytest.approx(model.prefill_seconds(10, 0))


@pytest.mark.parametrize(
    "values",
    [
        ({Tier.DISK: 0.0}, {}, 1.0),
        ({Tier.DISK: float("nan")}, {}, 1.0),
        ({}, {Tier.DISK: -1.0}, 1.0),
        ({}, {}, 0.0),
        ({}, {}, 1.0, float("inf")),
    ],
)
def test_measurements_that_are_none_are_refused(values):
    with pytest.raises(BlendError, match="measured"):
        CostModel(*values)
