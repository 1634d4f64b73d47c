"""The GPU pool, on a buffer of the host: the same code with another kind of memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from kvstore_samples import identity_of, reserve, reserve_and_fill, same, sample
from manual_lane import Queued

from kvstore import BudgetExceeded, ChunkKV, GpuPool, HostTier, MemoryTier, StoreError, Tier
from kvstore.blocks import ArenaMemory
from kvstore.gpu import require_free
from kvstore.pinned import HostBuffer

ONE = sample(0).nbytes
KEY = identity_of(1).key
OTHER = identity_of(2).key
GIB = 1 << 30


@pytest.fixture
def pool() -> GpuPool:
    assert ONE % 512 == 0, "the samples fill the pool to the last byte"
    return GpuPool(2 * ONE, "cpu")


def test_a_chunk_is_there_only_once_it_is_committed(pool):
    chunk = reserve_and_fill(pool, sample(1))
    assert pool.get(KEY) is None
    assert pool.bytes_used == ONE
    pool.commit(chunk)
    assert same(pool.get(KEY), sample(1))
    assert pool.get(KEY).kv.is_contiguous()
    assert pool.tier is Tier.GPU


def test_an_abandoned_reservation_leaves_nothing(pool):
    reserve(pool, sample(1))
    pool.abandon(KEY)
    assert pool.get(KEY) is None
    assert pool.bytes_used == 0
    for seed in (1, 2):
        reserve(pool, sample(seed))


def test_only_the_reserved_tensor_can_be_committed(pool):
    reserve(pool, sample(1))
    with pytest.raises(StoreError, match="room reserved for it"):
        pool.commit(sample(1))
    assert pool.get(KEY) is None


@pytest.mark.parametrize("tier", [GpuPool(ONE, "cpu"), HostTier(ONE)], ids=["gpu", "host"])
def test_room_reserved_within_inference_mode_can_be_filled_outside_of_it(tier):
    with torch.inference_mode():
        room = reserve(tier, sample(1))
    tier.commit(ChunkKV(identity_of(1), room.copy_(sample(1).kv)))
    assert same(tier.get(KEY), sample(1))


def test_what_was_got_stays_valid_after_the_eviction_and_its_memory_is_given_to_nobody(pool):
    pool.put(sample(1))
    pool.put(sample(2))
    layer = pool.get(KEY).k(1)
    assert pool.evict(KEY) == ONE
    assert pool.bytes_used == ONE
    with pytest.raises(BudgetExceeded, match="in one piece"):
        pool.put(sample(3))
    assert torch.equal(layer, sample(1).k(1))
    del layer
    gc.collect()
    pool.put(sample(3))
    assert same(pool.get(identity_of(3).key), sample(3))


def test_memory_that_queued_work_still_reads_is_given_to_nobody(pool):
    work = Queued()
    pool.put(sample(1))
    pool.put(sample(2))
    assert pool.evict(KEY, after=work) == ONE
    assert pool.get(KEY) is None
    assert pool.bytes_used == 2 * ONE
    with pytest.raises(BudgetExceeded):
        reserve(pool, sample(3))
    work.over = True
    pool.commit(reserve_and_fill(pool, sample(3)))
    assert same(pool.get(identity_of(3).key), sample(3))


def test_memory_that_a_cancelled_copy_still_writes_is_given_to_nobody(pool):
    copying = Queued()
    reserve(pool, sample(1))
    pool.abandon(KEY, after=copying)
    pool.put(sample(2))
    with pytest.raises(BudgetExceeded):
        pool.put(sample(3))
    copying.over = True
    pool.put(sample(3))


def test_a_deferred_eviction_waits_for_the_pin_and_for_the_work_of_both_who_asked(pool):
    evicters, holders = Queued(), Queued()
    pool.put(sample(1))
    pool.pin(KEY)
    assert pool.evict(KEY, after=evicters) == 0
    assert same(pool.get(KEY), sample(1))
    assert pool.unpin(KEY, after=holders) == ONE
    for work in (evicters, holders):
        assert pool.bytes_used == ONE
        work.over = True
    assert pool.bytes_used == 0


def test_work_of_a_pin_that_was_not_the_last_is_waited_for_as_well(pool):
    holders = Queued()
    pool.put(sample(1))
    pool.pin(KEY)
    pool.pin(KEY)
    pool.evict(KEY)
    assert pool.unpin(KEY, after=holders) == 0
    assert pool.unpin(KEY) == ONE
    assert pool.bytes_used == ONE
    holders.over = True
    assert pool.bytes_used == 0


def test_a_deferred_eviction_is_fenced_on_the_thread_that_asked_for_it():
    fences: dict[str, Queued] = {}

    def fence() -> Queued:
        return fences.setdefault(threading.current_thread().name, Queued())

    memory = ArenaMemory(HostBuffer, fence)
    tier = MemoryTier(2 * ONE, memory, Tier.GPU)
    tier.put(sample(1))
    tier.pin(KEY)
    tier.evict(KEY)
    other = threading.Thread(target=tier.unpin, args=(KEY,), name="other")
    other.start()
    other.join()
    assert tier.get(KEY) is None
    fences["other"].over = True
    assert tier.bytes_used == ONE, "kernels of the evicting thread may still read it"
    fences[threading.current_thread().name].over = True
    assert tier.bytes_used == 0


@pytest.mark.parametrize(("left", "soon"), [((), False), ((1,), True)])
def test_a_refusal_says_whether_what_is_leaving_would_make_room(pool, left, soon):
    pool.put(sample(1))
    pool.put(sample(2))
    for seed in left:
        pool.evict(identity_of(seed).key, after=Queued())
    with pytest.raises(BudgetExceeded) as caught:
        pool.put(sample(3))
    assert caught.value.soon == soon
    with pytest.raises(BudgetExceeded) as caught:
        pool.put(sample(50, tokens=8))
    assert not caught.value.soon, "too large for what is leaving"


def test_a_refusal_for_want_of_one_piece_may_pass_while_something_is_leaving():
    pool = GpuPool(3 * ONE, "cpu")
    for seed in (1, 2, 3):
        pool.put(sample(seed))
    reader = pool.get(OTHER).kv
    pool.set_budget(5 * ONE)
    leaving = Queued()
    pool.put(sample(4))
    pool.evict(KEY)
    pool.evict(identity_of(3).key)
    pool.evict(OTHER, after=leaving)
    del reader
    with pytest.raises(BudgetExceeded, match="in one piece") as caught:
        pool.put(sample(50, tokens=12))
    assert caught.value.soon


def test_a_smaller_budget_counts_at_once_and_what_is_over_it_stays(pool):
    pool.put(sample(1))
    pool.put(sample(2))
    pool.set_budget(ONE)
    assert same(pool.get(KEY), sample(1))
    pool.evict(KEY)
    assert pool.largest_free == 0
    with pytest.raises(BudgetExceeded):
        pool.put(sample(3))
    pool.evict(OTHER)
    assert pool.largest_free == ONE
    pool.put(sample(3))


def test_a_larger_budget_takes_more_memory(pool):
    pool.put(sample(1))
    pool.put(sample(2))
    pool.set_budget(3 * ONE)
    pool.put(sample(3))
    assert all(same(pool.get(identity_of(seed).key), sample(seed)) for seed in (1, 2, 3))
    with pytest.raises(StoreError):
        pool.set_budget(-1)


def test_free_memory_in_pieces_is_told_as_the_largest_piece():
    pool = GpuPool(3 * ONE, "cpu")
    for seed in (1, 2, 3):
        pool.put(sample(seed))
    pool.evict(KEY)
    pool.evict(identity_of(3).key)
    assert (pool.budget_bytes - pool.bytes_used, pool.largest_free) == (2 * ONE, ONE)
    twice = sample(50, tokens=8)
    with pytest.raises(BudgetExceeded, match=f"needs {2 * ONE} bytes in one piece, {ONE} is the largest"):
        pool.put(twice)
    pool.evict(OTHER)
    pool.put(twice)


def test_a_chunk_of_another_dtype_is_kept_as_it_is(pool):
    chunk = ChunkKV(identity_of(1), sample(1).kv.to(torch.bfloat16))
    pool.put(chunk)
    assert same(pool.get(KEY), chunk)


def test_a_pool_that_does_not_fit_is_refused_with_the_utilisation_that_would_fit():
    require_free(10 * GIB, free=10 * GIB, total=140 * GIB, ours=120 * GIB)
    with pytest.raises(StoreError) as caught:
        require_free(40 * GIB, free=10 * GIB, total=140 * GIB, ours=120 * GIB)
    text = str(caught.value)
    assert str(40 * GIB) in text
    assert str(10 * GIB) in text
    assert "gpu_memory_utilization to 0.64 or less" in text, "(140 - 40 - 10 of others) / 140, rounded down"
    with pytest.raises(StoreError, match="ask for less"):
        require_free(200 * GIB, free=10 * GIB, total=140 * GIB, ours=120 * GIB)
