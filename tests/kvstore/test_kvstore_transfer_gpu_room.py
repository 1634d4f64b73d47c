"""Copies to a GPU whose room is still being left, copies that are held up, and copies that nobody calls for."""

from __future__ import annotations

import threading
import time

import pytest
from kvstore_samples import identity_of, same, sample
from manual_lane import LONG_WORK, ManualLane, Queued, unhurried

from kvstore import ChunkStore, Tier, UnavailableReason
from kvstore.cuda_transfer import CudaPrefetcher
from kvstore.gpu import GpuPool
from kvstore.transfer import TransferOrder

SEEDS = (0, 10, 20, 30)
CHUNKS = [identity_of(seed, tokens=16) for seed in SEEDS]
FIRST, SECOND, THIRD, FOURTH = CHUNKS
ONE = sample(0, tokens=16).nbytes
LONG_S = 30


def to_gpu(*identities) -> list[TransferOrder]:
    return [TransferOrder(identity, Tier.GPU) for identity in identities]


class SelfWorkingLane(ManualLane):
    """Does at every mark what was asked before, on whichever thread asks."""

    def mark(self):
        mark = super().mark()
        self.work()
        return mark


@pytest.fixture
def opened():
    """Opens stores of four chunks of two layers, with a prefetcher that copies a layer at a time; closes them all."""
    opened = []

    def open_one(pool_chunks: int, lane: ManualLane, own_thread: bool = False, bytes_ahead: int = 100 * ONE):
        store = ChunkStore(None, 2 * len(CHUNKS) * ONE, gpu=GpuPool(pool_chunks * ONE, "cpu"))
        for seed in SEEDS:
            store.put(sample(seed, tokens=16))
        prefetcher = CudaPrefetcher(
            store,
            1,
            bytes_ahead=bytes_ahead,
            slice_bytes=ONE // 2,
            pace=unhurried(),
            lane=lane,
            own_thread=own_thread,
        )
        opened.append((store, prefetcher, lane))
        return store, prefetcher

    yield open_one
    for store, prefetcher, lane in opened:
        lane.work()
        prefetcher.close()
        assert store.pinned_count() == 0
        store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "chunk-copies"]


def reasons(prefetcher) -> dict[str, UnavailableReason | None]:
    return {result.key: result.reason for result in prefetcher.poll()}


def until(done) -> None:
    end = time.monotonic() + LONG_S
    while not done() and time.monotonic() < end:
        time.sleep(0.001)
    assert done()


def test_a_chunk_whose_room_was_left_in_the_same_step_comes_when_queued_work_on_it_is_over(opened):
    store, prefetcher = opened(1, lane := ManualLane())
    prefetcher.start(to_gpu(FIRST))
    lane.work()
    assert reasons(prefetcher) == {FIRST.key: None}
    forward_pass = Queued()
    store.evict(FIRST.key, Tier.GPU, after=forward_pass)
    prefetcher.start(to_gpu(SECOND))
    for _ in range(3):
        assert prefetcher.poll() == []
        assert (prefetcher.in_flight(), prefetcher.bytes_issued, store.pinned_count()) == (1, 0, 0)
    forward_pass.over = True
    assert prefetcher.poll() == []
    lane.work()
    assert reasons(prefetcher) == {SECOND.key: None}
    assert same(store.get(SECOND), sample(10, tokens=16))


def test_who_waits_for_room_stays_the_first(opened):
    store, prefetcher = opened(1, lane := ManualLane())
    prefetcher.start(to_gpu(FIRST))
    lane.work()
    prefetcher.poll()
    forward_pass = Queued()
    store.evict(FIRST.key, Tier.GPU, after=forward_pass)
    prefetcher.start(to_gpu(SECOND, THIRD))
    assert prefetcher.poll() == []
    forward_pass.over = True
    assert reasons(prefetcher) == {THIRD.key: UnavailableReason.GPU_BUDGET}
    lane.work()
    assert reasons(prefetcher) == {SECOND.key: None}


def test_a_chunk_that_waits_for_room_is_called_off_at_once(opened):
    store, prefetcher = opened(1, lane := ManualLane())
    prefetcher.start(to_gpu(FIRST))
    lane.work()
    prefetcher.poll()
    store.evict(FIRST.key, Tier.GPU, after=Queued())
    prefetcher.start(to_gpu(SECOND))
    assert prefetcher.cancel(SECOND.key, target=Tier.GPU)
    assert reasons(prefetcher) == {SECOND.key: UnavailableReason.CANCELLED}


def test_a_chunk_too_large_for_what_is_leaving_is_refused_at_once(opened):
    store, prefetcher = opened(2, lane := ManualLane())
    prefetcher.start(to_gpu(FIRST, SECOND))
    lane.work()
    prefetcher.poll()
    store.evict(FIRST.key, Tier.GPU, after=Queued())
    store.set_budget(Tier.GPU, ONE)
    prefetcher.start(to_gpu(THIRD))
    assert reasons(prefetcher) == {THIRD.key: UnavailableReason.GPU_BUDGET}


def test_a_chunk_waits_for_the_room_of_a_copy_that_was_called_off(opened):
    _, prefetcher = opened(1, lane := ManualLane())
    prefetcher.start(to_gpu(FIRST))
    prefetcher.cancel(FIRST.key, target=Tier.GPU)
    prefetcher.start(to_gpu(SECOND))
    assert prefetcher.poll() == []
    lane.work()
    assert reasons(prefetcher) == {FIRST.key: UnavailableReason.CANCELLED}
    lane.work()
    assert reasons(prefetcher) == {SECOND.key: None}


def test_while_paused_no_slice_is_issued_and_what_was_issued_ends(opened):
    store, prefetcher = opened(4, lane := ManualLane(), bytes_ahead=1)
    prefetcher.start(to_gpu(FIRST))
    prefetcher.pause()
    prefetcher.start(to_gpu(SECOND))
    lane.work()
    for _ in range(3):
        assert prefetcher.poll() == []
        assert (lane.bytes_asked, prefetcher.bytes_issued) == (ONE // 2, 0)
    assert store.gpu.bytes_used == ONE, "no room is taken for what has to wait"
    prefetcher.resume()
    assert lane.bytes_asked == ONE, "it goes on at once"
    while prefetcher.in_flight():
        lane.work()
    assert reasons(prefetcher) == {FIRST.key: None, SECOND.key: None}


def test_loads_to_the_host_go_on_while_copies_are_paused(tmp_path):
    store = ChunkStore(tmp_path, ONE, gpu=GpuPool(ONE, "cpu"))
    store.put(sample(0, tokens=16))
    store.evict(FIRST.key, Tier.HOST)
    prefetcher = CudaPrefetcher(store, lane=ManualLane(), own_thread=False)
    prefetcher.pause()
    prefetcher.start([TransferOrder(FIRST, Tier.HOST)])
    assert prefetcher.wait([FIRST.key], LONG_S)[FIRST.key].ok
    prefetcher.close()


def test_closing_does_not_wait_for_what_is_paused(opened):
    _, prefetcher = opened(4, lane := ManualLane(), bytes_ahead=1)
    prefetcher.start(to_gpu(FIRST, SECOND))
    prefetcher.pause()
    lane.work()
    prefetcher.close()
    assert set(reasons(prefetcher).values()) == {UnavailableReason.CANCELLED}


def test_flights_are_counted_and_awaited_by_target(tmp_path):
    store = ChunkStore(tmp_path, 2 * ONE, gpu=GpuPool(ONE, "cpu"))
    for seed in SEEDS[:2]:
        store.put(sample(seed, tokens=16))
    store.evict(SECOND.key, Tier.HOST)
    prefetcher = CudaPrefetcher(store, lane=(lane := ManualLane()), own_thread=False)
    prefetcher.start([*to_gpu(FIRST), TransferOrder(SECOND, Tier.HOST)])
    prefetcher.wait_any(LONG_S, Tier.HOST)
    assert [prefetcher.in_flight(target) for target in (None, Tier.HOST, Tier.GPU)] == [1, 0, 1]
    assert [result.target for result in prefetcher.poll()] == [Tier.HOST]
    lane.work()
    prefetcher.wait_any(0.0, Tier.HOST)
    prefetcher.wait_any(LONG_S, Tier.GPU)
    assert [result.target for result in prefetcher.poll()] == [Tier.GPU]
    assert prefetcher.in_flight() == 0
    prefetcher.close()


def test_with_a_thread_of_its_own_chunks_arrive_one_behind_another_though_nobody_calls(opened):
    store, prefetcher = opened(4, SelfWorkingLane(), own_thread=True, bytes_ahead=1)
    told: list[str] = []
    store.subscribe(lambda event: told.append(event.key))
    prefetcher.start(to_gpu(*CHUNKS))
    until(lambda: len(told) == len(CHUNKS))
    assert told == [identity.key for identity in CHUNKS]
    assert reasons(prefetcher) == dict.fromkeys(told)
    for seed, identity in zip(SEEDS, CHUNKS, strict=True):
        assert store.lookup(identity) is Tier.GPU
        assert same(store.get(identity), sample(seed, tokens=16))


def test_the_own_thread_brings_a_chunk_whose_room_becomes_free_while_nobody_calls(opened):
    store, prefetcher = opened(1, SelfWorkingLane(), own_thread=True)
    prefetcher.start(to_gpu(FIRST))
    until(lambda: store.lookup(FIRST) is Tier.GPU)
    forward_pass = Queued()
    store.evict(FIRST.key, Tier.GPU, after=forward_pass)
    prefetcher.start(to_gpu(SECOND))
    forward_pass.over = True
    until(lambda: store.lookup(SECOND) is Tier.GPU)


def test_the_own_thread_issues_nothing_while_paused(opened):
    store, prefetcher = opened(4, lane := SelfWorkingLane(), own_thread=True)
    prefetcher.pause()
    prefetcher.start(to_gpu(FIRST))
    time.sleep(0.01)
    assert (lane.bytes_asked, store.gpu.bytes_used, prefetcher.in_flight()) == (0, 0, 1)
    prefetcher.resume()
    until(lambda: store.lookup(FIRST) is Tier.GPU)


def test_the_own_thread_is_not_woken_while_there_is_nothing_to_do(opened, monkeypatch):
    looks = []
    advance = CudaPrefetcher._advance
    monkeypatch.setattr(CudaPrefetcher, "_advance", lambda self: (looks.append(1), advance(self)))
    store, prefetcher = opened(4, SelfWorkingLane(), own_thread=True)
    prefetcher.start(to_gpu(FIRST))
    until(lambda: store.lookup(FIRST) is Tier.GPU)
    until(lambda: prefetcher.in_flight() == 0)
    time.sleep(0.005)
    before = len(looks)
    time.sleep(0.05)
    assert len(looks) == before


def test_many_threads_that_order_cancel_evict_and_poll_lose_no_room_and_no_pin(opened):
    store, prefetcher = opened(2, SelfWorkingLane(), own_thread=True, bytes_ahead=1)

    def churn(number: int) -> None:
        for turn in range(100):
            identity = CHUNKS[(number + turn) % len(CHUNKS)]
            prefetcher.start(to_gpu(identity))
            if turn % 3 == 0:
                prefetcher.cancel(identity.key, target=Tier.GPU)
            store.evict(CHUNKS[(number + turn + 1) % len(CHUNKS)].key, Tier.GPU)
            prefetcher.poll()

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: prefetcher.in_flight() == 0)
    for seed, identity in zip(SEEDS, CHUNKS, strict=True):
        assert same(store.get(identity), sample(seed, tokens=16))
        store.evict(identity.key, Tier.GPU)
    assert (store.gpu.bytes_used, store.pinned_count()) == (0, 0)
    assert store.gpu.largest_free == store.gpu.budget_bytes


def test_what_goes_on_after_a_pause_comes_behind_what_its_caller_has_asked_of_the_device_meanwhile(opened):
    _, prefetcher = opened(4, lane := ManualLane(), bytes_ahead=1)
    prefetcher.resume()
    assert lane.followed_after == []
    prefetcher.pause()
    prefetcher.start(to_gpu(FIRST))
    prefetcher.resume()
    assert lane.followed_after == [0]
    assert lane.bytes_asked > 0


def test_what_is_waited_for_after_a_pause_does_not_count_as_copying(opened):
    _, prefetcher = opened(4, lane := ManualLane(), bytes_ahead=1 << 30)
    prefetcher.start(to_gpu(FIRST))
    prefetcher.pause()
    prefetcher.resume()
    prefetcher.start(to_gpu(SECOND))
    while prefetcher.in_flight():
        lane.work()
    assert all(result.ok and result.seconds < LONG_WORK for result in prefetcher.poll())
