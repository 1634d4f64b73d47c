"""Transfers to a GPU, whatever the order in which copies are asked for, called off, evicted and done.

The device is the CPU, and its copies are done when a test says so; `tests/gpu/check_prefetcher.py` needs a real one.
"""

from __future__ import annotations

import random
import threading

import pytest
from kvstore_samples import identity_of, same, sample
from manual_lane import ManualLane, unhurried

from kvstore import ChunkStore, StoreError, Tier, UnavailableReason
from kvstore.cuda_transfer import CudaPrefetcher
from kvstore.gpu import GpuPool
from kvstore.pacing import Pace
from kvstore.transfer import TransferOrder, TransferResult

SEEDS = range(0, 80, 10)
MANY = [identity_of(seed, tokens=16) for seed in SEEDS]
ONE = sample(0, tokens=16).nbytes
SLICE = ONE // 2
FIRST = MANY[0]


def to_gpu(*identities) -> list[TransferOrder]:
    return [TransferOrder(identity, Tier.GPU) for identity in identities]


def to_host(*identities) -> list[TransferOrder]:
    return [TransferOrder(identity, Tier.HOST) for identity in identities]


def called_off(identity) -> TransferResult:
    return TransferResult.failed(identity.key, UnavailableReason.CANCELLED, Tier.GPU)


class GatedStore(ChunkStore):
    """A store whose loads wait at a gate."""

    gate = threading.Event()

    def load(self, identity):
        assert self.gate.wait(30)
        return super().load(identity)


class Bench:
    """A store of two-layer chunks, a pool that holds some of them, and a prefetcher that copies a layer at a time."""

    def __init__(
        self, root, pool_chunks: int = len(MANY), bytes_ahead: int = 100 * ONE, pace: Pace | None = None
    ) -> None:
        self.store = GatedStore(root, 2 * len(MANY) * ONE, gpu=GpuPool(pool_chunks * ONE, "cpu"))
        self.store.gate = threading.Event()
        for seed in SEEDS:
            self.store.put(sample(seed, tokens=16))
        self.lane = ManualLane()
        self.prefetcher = CudaPrefetcher(
            self.store,
            bytes_ahead=bytes_ahead,
            slice_bytes=SLICE,
            pace=pace or unhurried(),
            lane=self.lane,
            own_thread=False,
        )

    @property
    def pool(self) -> GpuPool:
        assert self.store.gpu is not None
        return self.store.gpu

    def tier(self, identity) -> Tier | None:
        return self.store.lookup(identity)

    def arrive(self, *identities) -> None:
        self.prefetcher.start(to_gpu(*identities))
        self.lane.work()
        assert all(result.ok for result in self.prefetcher.poll())

    def check_nothing_is_left_over(self) -> None:
        assert self.store.pinned_count() == 0
        for identity in MANY:
            self.store.evict(identity.key, Tier.GPU)
        assert self.pool.bytes_used == 0
        assert self.pool.largest_free == self.pool.budget_bytes


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.store.gate.set()
    bench.lane.work()
    bench.prefetcher.close()
    bench.check_nothing_is_left_over()
    bench.store.close()


def test_a_chunk_is_shown_on_the_gpu_only_after_its_copy_is_done(bench):
    bench.prefetcher.start(to_gpu(FIRST))
    for _ in range(2):
        assert bench.prefetcher.poll() == []
        assert bench.tier(FIRST) is Tier.HOST
        assert same(bench.store.get(FIRST), sample(0, tokens=16))
        assert bench.prefetcher.in_flight() == 1
        bench.lane.work(1)
    assert bench.prefetcher.poll() == [TransferResult(FIRST.key, True, None, ONE, 2.0, Tier.HOST, Tier.GPU)]
    assert bench.tier(FIRST) is Tier.GPU
    assert same(bench.store.get(FIRST), sample(0, tokens=16))
    assert bench.pool.get(FIRST.key) is not None
    assert bench.prefetcher.in_flight() == 0


def test_however_many_ask_a_chunk_is_copied_once(bench):
    for _ in range(64):
        bench.prefetcher.start(to_gpu(FIRST, FIRST))
    bench.lane.work()
    assert len(bench.prefetcher.poll()) == 1
    assert bench.lane.bytes_asked == ONE
    bench.prefetcher.start(to_gpu(FIRST))
    assert bench.prefetcher.poll() == [TransferResult(FIRST.key, True, None, 0, 0.0, Tier.GPU, Tier.GPU)]
    assert bench.lane.bytes_asked == ONE


def test_twenty_batches_of_permuted_chunks_cause_one_copy_a_chunk(bench):
    rng = random.Random(0)
    for _ in range(20):
        batch = rng.sample(MANY, len(MANY))
        bench.prefetcher.start(to_gpu(*batch))
        bench.lane.work(rng.randrange(4))
        bench.prefetcher.poll()
    bench.lane.work()
    bench.prefetcher.poll()
    assert bench.lane.bytes_asked == len(MANY) * ONE
    assert all(bench.tier(identity) is Tier.GPU for identity in MANY)


def test_no_more_is_issued_ahead_than_the_bound(tmp_path):
    bench = Bench(tmp_path, bytes_ahead=3 * SLICE)
    bench.prefetcher.start(to_gpu(*MANY))
    while bench.prefetcher.in_flight():
        assert bench.prefetcher.bytes_issued == bench.lane.bytes_asked - bench.lane.copies_done * SLICE
        assert bench.prefetcher.bytes_issued <= 3 * SLICE
        bench.lane.work(1)
    assert bench.lane.bytes_asked == len(MANY) * ONE
    bench.prefetcher.close()
    bench.check_nothing_is_left_over()


def test_each_of_several_copies_in_a_row_takes_its_own_seconds(bench):
    bench.prefetcher.start(to_gpu(*MANY[:3]))
    bench.lane.work()
    assert [(result.key, result.seconds) for result in bench.prefetcher.poll()] == [(i.key, 2.0) for i in MANY[:3]]
    # One that finds nothing under way begins with itself.
    bench.prefetcher.start(to_gpu(MANY[3]))
    bench.lane.work()
    assert [result.seconds for result in bench.prefetcher.poll()] == [2.0]


def test_a_copy_ahead_of_its_pace_waits_until_its_time_has_come(tmp_path):
    now = [0.0]
    # The lane takes a second for a slice, of which half the time is allowed.
    bench = Bench(tmp_path, bytes_ahead=SLICE, pace=Pace(0.5, lambda: now[0], learnt_from=SLICE))
    bench.prefetcher.start(to_gpu(FIRST, MANY[1]))
    asked = []
    for _ in range(9):
        bench.lane.work()
        bench.prefetcher.poll()
        asked.append(bench.lane.bytes_asked // SLICE)
        now[0] += 1.0
    assert asked == [2, 3, 3, 4, 4, 4, 4, 4, 4]
    assert bench.tier(MANY[1]) is Tier.GPU


def test_a_slice_larger_than_the_bound_is_copied_all_the_same(tmp_path):
    bench = Bench(tmp_path, bytes_ahead=1)
    bench.prefetcher.start(to_gpu(FIRST, MANY[1]))
    for _ in range(4):
        assert bench.prefetcher.bytes_issued == SLICE
        bench.lane.work(1)
        bench.prefetcher.poll()
    assert bench.tier(MANY[1]) is Tier.GPU


def test_a_queued_copy_is_called_off_at_once(tmp_path):
    bench = Bench(tmp_path, bytes_ahead=1)
    bench.prefetcher.start(to_gpu(FIRST, MANY[1]))
    assert bench.prefetcher.cancel(MANY[1].key, target=Tier.GPU)
    assert not bench.prefetcher.cancel(MANY[1].key, target=Tier.GPU)
    assert bench.prefetcher.poll() == [called_off(MANY[1])]
    bench.lane.work(1)
    bench.prefetcher.poll()
    bench.lane.work()
    assert [result.key for result in bench.prefetcher.poll()] == [FIRST.key]
    assert bench.lane.bytes_asked == ONE


def test_a_running_copy_called_off_is_issued_no_further_and_keeps_its_room_until_its_last_slice_is_done(tmp_path):
    bench = Bench(tmp_path, bytes_ahead=1)
    bench.prefetcher.start(to_gpu(FIRST))
    assert bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    assert not bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    assert bench.prefetcher.poll() == []
    assert bench.pool.bytes_used == ONE
    bench.lane.work()
    assert bench.prefetcher.poll() == [called_off(FIRST)]
    assert bench.lane.bytes_asked == SLICE
    assert bench.tier(FIRST) is Tier.HOST
    bench.check_nothing_is_left_over()


def test_a_fully_issued_copy_called_off_is_never_shown(bench):
    bench.prefetcher.start(to_gpu(FIRST))
    assert bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    bench.lane.work()
    assert bench.prefetcher.poll() == [called_off(FIRST)]
    assert bench.tier(FIRST) is Tier.HOST
    assert bench.pool.bytes_used == 0


@pytest.mark.parametrize("slices_done", [0, 1])
def test_a_copy_wanted_again_while_it_is_being_called_off_goes_on(tmp_path, slices_done):
    bench = Bench(tmp_path, bytes_ahead=1)
    bench.prefetcher.start(to_gpu(FIRST))
    bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    bench.lane.work(slices_done)
    bench.prefetcher.start(to_gpu(FIRST))
    while bench.prefetcher.in_flight():
        bench.lane.work(1)
    results = bench.prefetcher.poll()
    assert results[-1].ok
    assert same(bench.store.get(FIRST), sample(0, tokens=16))
    assert bench.lane.bytes_asked == ONE, "the slice that was copied is not copied again"
    bench.check_nothing_is_left_over()


def test_a_copy_wanted_again_between_two_of_its_slices_is_not_shown_half(tmp_path):
    bench = Bench(tmp_path, bytes_ahead=SLICE + 1)
    bench.prefetcher.start(to_gpu(FIRST, MANY[1]))
    bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    bench.prefetcher.poll()
    bench.prefetcher.start(to_gpu(FIRST))
    bench.lane.work(1)
    bench.prefetcher.poll()
    bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    bench.prefetcher.start(to_gpu(FIRST))
    assert bench.tier(FIRST) is Tier.HOST
    while bench.prefetcher.in_flight():
        bench.lane.work(1)
    assert same(bench.store.get(FIRST), sample(0, tokens=16))
    assert bench.tier(FIRST) is bench.tier(MANY[1]) is Tier.GPU
    bench.check_nothing_is_left_over()


def test_a_chunk_evicted_from_the_host_while_it_is_copied_leaves_when_the_copy_is_done(bench):
    bench.prefetcher.start(to_gpu(FIRST))
    assert bench.store.evict(FIRST.key, Tier.HOST) == 0
    assert bench.store.host_bytes_used == len(MANY) * ONE
    bench.lane.work()
    bench.prefetcher.poll()
    assert bench.store.host_bytes_used == (len(MANY) - 1) * ONE
    assert same(bench.store.get(FIRST), sample(0, tokens=16))


def test_a_chunk_that_left_the_host_before_its_turn_is_not_copied(tmp_path):
    bench = Bench(tmp_path, bytes_ahead=1)
    bench.prefetcher.start(to_gpu(FIRST, MANY[1]))
    assert bench.store.evict(MANY[1].key, Tier.HOST) == ONE
    while bench.prefetcher.in_flight():
        bench.lane.work(1)
    failed = [result for result in bench.prefetcher.poll() if not result.ok]
    assert failed == [TransferResult.failed(MANY[1].key, UnavailableReason.EVICTED, Tier.GPU)]
    bench.check_nothing_is_left_over()


def test_a_chunk_that_finds_no_room_in_the_pool_says_so_and_the_next_one_that_does_arrives(tmp_path):
    bench = Bench(tmp_path, pool_chunks=1)
    bench.arrive(FIRST)
    bench.prefetcher.start(to_gpu(MANY[1]))
    assert bench.prefetcher.poll() == [TransferResult.failed(MANY[1].key, UnavailableReason.GPU_BUDGET, Tier.GPU)]
    bench.store.evict(FIRST.key, Tier.GPU)
    bench.arrive(MANY[1])
    bench.check_nothing_is_left_over()


def test_room_of_a_copy_that_was_called_off_is_there_for_the_next_copy_in_the_same_look(tmp_path):
    bench = Bench(tmp_path, pool_chunks=1, bytes_ahead=SLICE)
    bench.prefetcher.start(to_gpu(FIRST, MANY[1]))
    bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    bench.lane.work()
    assert bench.prefetcher.poll() == [called_off(FIRST)]
    while bench.prefetcher.in_flight():
        bench.lane.work()
    assert bench.tier(MANY[1]) is Tier.GPU


def test_a_chunk_on_disk_is_loaded_to_the_host_once_and_then_copied(bench):
    bench.store.evict(FIRST.key, Tier.HOST)
    bench.prefetcher.start([*to_gpu(FIRST), *to_host(FIRST), *to_gpu(FIRST)])
    assert bench.prefetcher.in_flight() == 2
    bench.store.gate.set()
    result = bench.prefetcher.wait([FIRST.key], timeout_s=30)[FIRST.key]
    assert (result.ok, result.nbytes, result.tier_from) == (True, ONE, Tier.DISK)
    assert bench.prefetcher.wait([FIRST.key], timeout_s=0, target=Tier.GPU) == {}
    bench.lane.work()
    on_gpu = bench.prefetcher.wait([FIRST.key], timeout_s=30, target=Tier.GPU)[FIRST.key]
    assert (on_gpu.ok, on_gpu.nbytes, on_gpu.tier_from, on_gpu.target) == (True, ONE, Tier.DISK, Tier.GPU)
    assert on_gpu.seconds > 2.0
    assert {result.target for result in bench.prefetcher.poll()} == {Tier.HOST, Tier.GPU}


def test_an_order_to_the_gpu_alone_has_one_result(bench):
    bench.store.gate.set()
    bench.store.evict(FIRST.key, Tier.HOST)
    bench.prefetcher.start(to_gpu(FIRST))
    while not bench.lane.bytes_asked:
        bench.prefetcher.wait([FIRST.key], timeout_s=0.001, target=Tier.GPU)
    bench.lane.work()
    bench.prefetcher.wait_any(30)
    assert [result.target for result in bench.prefetcher.poll()] == [Tier.GPU]


def test_a_load_ordered_again_is_not_told_of_before_it_has_ended_again(bench):
    bench.store.evict(FIRST.key, Tier.HOST)
    bench.prefetcher.start(to_host(FIRST, MANY[1]))
    bench.prefetcher.cancel(FIRST.key)
    bench.store.gate.set()
    while bench.prefetcher.in_flight():
        bench.prefetcher.wait_any(0.001)
    bench.store.gate.clear()
    bench.prefetcher.start(to_host(FIRST))
    assert [result.key for result in bench.prefetcher.poll()] == [MANY[1].key]
    bench.store.gate.set()
    bench.prefetcher.wait_any(30)
    assert [(result.key, result.ok) for result in bench.prefetcher.poll()] == [(FIRST.key, True)]


def test_a_chunk_that_nobody_has_says_why_it_does_not_come(bench):
    bench.store.gate.set()
    bench.prefetcher.start(to_gpu(identity_of(999)))
    bench.prefetcher.wait_any(30)
    assert bench.prefetcher.poll() == [TransferResult.failed(identity_of(999).key, UnavailableReason.MISSING, Tier.GPU)]


def test_calling_off_a_copy_calls_off_the_load_that_was_only_for_it(bench):
    for identity in MANY[:2]:
        bench.store.evict(identity.key, Tier.HOST)
    bench.prefetcher.start([*to_gpu(FIRST, MANY[1]), *to_host(MANY[1])])
    assert bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    assert bench.prefetcher.cancel(MANY[1].key, target=Tier.GPU)
    assert bench.prefetcher.poll() == [called_off(FIRST), called_off(MANY[1])]
    bench.store.gate.set()
    bench.prefetcher.wait([FIRST.key, MANY[1].key], timeout_s=30)
    assert [result.ok for result in bench.prefetcher.poll()] == [True]
    assert (bench.tier(FIRST), bench.tier(MANY[1])) == (Tier.DISK, Tier.HOST)


def test_a_copy_ordered_again_while_its_load_is_being_called_off_arrives(bench):
    bench.store.evict(FIRST.key, Tier.HOST)
    for _ in range(3):
        bench.prefetcher.start(to_gpu(FIRST))
        bench.prefetcher.cancel(FIRST.key, target=Tier.GPU)
    bench.prefetcher.start(to_gpu(FIRST))
    bench.store.gate.set()
    while bench.prefetcher.in_flight():
        bench.lane.work()
    assert bench.tier(FIRST) is Tier.GPU
    assert [result.ok for result in bench.prefetcher.poll()] == [True]


def test_calling_off_a_load_calls_off_the_copy_that_waits_for_it(bench):
    bench.store.evict(FIRST.key, Tier.HOST)
    bench.prefetcher.start(to_gpu(FIRST))
    assert bench.prefetcher.cancel(FIRST.key)
    bench.store.gate.set()
    bench.prefetcher.wait_any(30)
    assert bench.prefetcher.poll() == [called_off(FIRST)]


def test_waiting_for_a_copy_gives_up_after_its_time(bench):
    bench.prefetcher.start(to_gpu(FIRST))
    assert bench.prefetcher.wait([FIRST.key], timeout_s=0.01, target=Tier.GPU) == {}
    bench.prefetcher.wait_any(0.01)
    assert bench.prefetcher.in_flight() == 1


def test_closing_waits_for_what_is_issued_and_shows_nothing_of_it(tmp_path):
    bench = Bench(tmp_path, bytes_ahead=1)
    bench.prefetcher.start(to_gpu(*MANY))
    closing = threading.Thread(target=bench.prefetcher.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "a slice is being copied"
    bench.lane.work()
    closing.join(30)
    assert not closing.is_alive()
    assert bench.lane.bytes_asked == SLICE
    bench.prefetcher.close()
    assert sorted(bench.prefetcher.poll(), key=str) == sorted(map(called_off, MANY), key=str)
    with pytest.raises(StoreError):
        bench.prefetcher.start(to_gpu(FIRST))
    bench.check_nothing_is_left_over()


def test_a_store_closed_too_early_ends_what_is_in_flight_and_loses_no_room(tmp_path, caplog):
    bench = Bench(tmp_path, bytes_ahead=ONE)
    bench.prefetcher.start(to_gpu(FIRST, MANY[1]))
    bench.store.close()
    while bench.prefetcher.in_flight():
        bench.lane.work()
    assert not any(result.ok for result in bench.prefetcher.poll())
    assert "for nothing" in caplog.text
    bench.prefetcher.close()
    bench.check_nothing_is_left_over()


def test_a_prefetcher_refuses_what_it_cannot_serve(tmp_path, bench):
    with pytest.raises(StoreError, match="GPU pool"):
        CudaPrefetcher(ChunkStore(None, ONE), lane=ManualLane(), own_thread=False)
    with pytest.raises(StoreError, match="disk"):
        bench.prefetcher.start([*to_gpu(FIRST), TransferOrder(FIRST, Tier.DISK)])
    assert bench.prefetcher.in_flight() == 0
