"""What the scheduler ordered and what the workers tell come together: transfers, evictions and their reasons."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from connector_samples import identity_of, plan_of

from cacheblend.plan import Policy
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.selectors import make_selector
from cacheblend.vllm_backend.directory import ChunkDirectory
from cacheblend.vllm_backend.metrics import BlendStats
from cacheblend.vllm_backend.traffic import ChunkTraffic
from kvstore.events import Evicted, Published
from kvstore.tiers import Tier

ONE = 100
CHUNK = identity_of(1)
CAME = Published(CHUNK.key, Tier.HOST, ONE, 4)
LEFT = Evicted(CHUNK.key, Tier.HOST, ONE)


@pytest.fixture
def traffic():
    scheduler = ChunkScheduler({Tier.HOST: ONE})
    return ChunkTraffic(scheduler, (Tier.HOST,), ChunkDirectory(None, 1), None, 1, BlendStats())


def tell(traffic, *events) -> None:
    traffic.take_events([(0, event) for event in events])


def evictions(traffic) -> dict[str, int]:
    return traffic._stats.data.get("evictions", {})


def test_a_chunk_that_leaves_on_orders_is_counted_under_their_reason(traffic):
    tell(traffic, CAME)
    traffic.set_budget(Tier.HOST, 0)
    assert [eviction.key for eviction in traffic.take_orders()[0]] == [CHUNK.key]
    tell(traffic, LEFT)
    assert evictions(traffic) == {"host:budget": 1}


@pytest.mark.parametrize(
    ("name", "ratio", "awaited"), [("query", 0.5, {CHUNK.key}), ("query", 1.0, set()), ("full", None, set())]
)
def test_who_recomputes_everything_awaits_no_chunk_that_is_on_its_way_for_another(traffic, name, ratio, awaited):
    tell(traffic, Published(CHUNK.key, Tier.DISK, ONE, 4))
    assert traffic.admit("reads", plan_of([CHUNK], make_selector("none")), Policy.BLEND)[1] == {CHUNK.key}
    admission, waiting_for = traffic.admit("another", plan_of([CHUNK], make_selector(name, ratio)), Policy.BLEND)
    assert (admission.plan.keys, waiting_for) == ((CHUNK.key,), awaited)


def test_the_reason_of_an_eviction_that_found_nothing_is_not_that_of_a_later_one(traffic):
    tell(traffic, CAME)
    traffic.set_budget(Tier.HOST, 0)
    traffic.take_orders()
    # The scheduler had believed the chunk there: its place is told anew, never that it left.
    traffic.lose(CHUNK.key)
    traffic.set_budget(Tier.HOST, ONE)
    tell(traffic, CAME, LEFT)
    assert evictions(traffic) == {"host:store": 1}


def test_reasons_that_no_worker_ever_asks_for_do_not_pile_up(traffic, monkeypatch):
    monkeypatch.setattr("cacheblend.vllm_backend.traffic.REASONS_KEPT", 3)
    for seed in range(10):
        traffic.set_budget(Tier.HOST, ONE)
        tell(traffic, Published(identity_of(seed).key, Tier.HOST, ONE, 4))
        traffic.set_budget(Tier.HOST, 0)
        traffic.take_orders()
    assert len(traffic._why_evicted) == 3
    tell(traffic, Evicted(identity_of(9).key, Tier.HOST, ONE))
    assert evictions(traffic) == {"host:budget": 1}
