from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvstore_samples import identity_of, same, sample

from kvstore import (
    AsyncPrefetcher,
    ChunkIdentity,
    ChunkStore,
    ChunkUnavailable,
    StoreError,
    ThreadPrefetcher,
    Tier,
    TransferResult,
    UnavailableReason,
)
from kvstore.transfer import TransferOrder

ONE = sample(0).nbytes
MANY = [identity_of(seed) for seed in range(0, 80, 10)]


def to_host(*identities: ChunkIdentity) -> list[TransferOrder]:
    return [TransferOrder(identity, Tier.HOST) for identity in identities]


class GatedStore(ChunkStore):
    """A store whose loads are counted and wait at a gate."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.gate = threading.Event()
        self.loads = 0

    def load(self, identity):
        self.loads += 1
        assert self.gate.wait(30)
        return super().load(identity)


@pytest.fixture
def store(tmp_path):
    filler = ChunkStore(tmp_path, 0)
    for identity in MANY:
        filler.put(sample(identity.token_ids[0]))
    store = GatedStore(tmp_path, 100 * ONE)
    yield store
    store.gate.set()
    store.close()


@pytest.fixture
def prefetcher(store):
    prefetcher: AsyncPrefetcher = ThreadPrefetcher(store)
    yield prefetcher
    store.gate.set()
    prefetcher.close()


def test_starting_never_blocks_and_every_chunk_arrives(store, prefetcher):
    prefetcher.start(to_host(*MANY))
    assert prefetcher.in_flight() == len(MANY)
    assert prefetcher.poll() == []
    assert prefetcher.wait([MANY[0].key], timeout_s=0.01) == {}
    store.gate.set()
    results = prefetcher.wait([identity.key for identity in MANY], timeout_s=30)
    assert all(result.ok and result.nbytes == ONE for result in results.values())
    assert {result.tier_from for result in results.values()} == {Tier.DISK}
    assert prefetcher.in_flight() == 0
    assert {result.key for result in prefetcher.poll()} == set(results) == {i.key for i in MANY}
    assert prefetcher.poll() == []
    assert all(same(store.get(identity), sample(identity.token_ids[0])) for identity in MANY)


def test_waiting_for_any_ends_with_the_first_chunk_that_finishes(store, prefetcher):
    prefetcher.start(to_host(*MANY))
    waiting = threading.Thread(target=prefetcher.wait_any, args=(30,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "nothing has finished"
    assert prefetcher.cancel(MANY[-1].key)
    waiting.join(30)
    assert not waiting.is_alive()
    assert prefetcher.in_flight() == len(MANY) - 1
    assert [result.key for result in prefetcher.poll()] == [MANY[-1].key]


def test_waiting_for_any_returns_at_once_until_what_finished_is_polled(store, prefetcher):
    store.put(sample(MANY[0].token_ids[0]))
    prefetcher.start(to_host(MANY[0]))
    for _ in range(2):
        assert _returns(prefetcher, timeout_s=30)
    assert len(prefetcher.poll()) == 1
    assert not _returns(prefetcher, timeout_s=30, within_s=0.05)
    prefetcher.start(to_host(MANY[0]))
    assert _returns(prefetcher, timeout_s=30)


def test_waiting_for_any_gives_up_after_its_time(prefetcher):
    assert _returns(prefetcher, timeout_s=0.0)
    prefetcher.start(to_host(*MANY))
    assert _returns(prefetcher, timeout_s=0.01)
    assert prefetcher.in_flight() == len(MANY)


def _returns(prefetcher, timeout_s: float, within_s: float = 20.0) -> bool:
    """Whether `wait_any` comes back long before a timeout of half a minute, or soon after a short one."""
    waiting = threading.Thread(target=prefetcher.wait_any, args=(timeout_s,), daemon=True)
    waiting.start()
    waiting.join(within_s)
    return not waiting.is_alive()


def test_sixty_four_askers_of_one_chunk_cause_one_load(store, prefetcher):
    start = threading.Barrier(64)

    def ask() -> TransferResult:
        start.wait()
        prefetcher.start(to_host(MANY[0]))
        store.gate.set()
        return prefetcher.wait([MANY[0].key], timeout_s=30)[MANY[0].key]

    with ThreadPoolExecutor(64) as pool:
        results = [asker.result(timeout=60) for asker in [pool.submit(ask) for _ in range(64)]]
    assert store.loads == 1
    assert all(result.ok for result in results)


def test_threads_that_load_one_chunk_directly_read_it_once(store):
    store.gate.set()
    start = threading.Barrier(16)

    def load():
        start.wait()
        return store.load(MANY[0])

    with ThreadPoolExecutor(16) as pool:
        reports = [loader.result(timeout=60) for loader in [pool.submit(load) for _ in range(16)]]
    assert sum(report.nbytes for report in reports) == ONE


def test_a_chunk_that_is_on_the_host_finishes_at_once(store, prefetcher):
    store.put(sample(MANY[0].token_ids[0]))
    prefetcher.start(to_host(MANY[0]))
    assert prefetcher.poll() == [TransferResult(MANY[0].key, True, None, 0, 0.0, Tier.HOST)]
    assert store.loads == 0


def test_a_load_that_fails_says_why(store, prefetcher):
    store.gate.set()
    prefetcher.start(to_host(identity_of(999)))
    key = identity_of(999).key
    result = prefetcher.wait([key], timeout_s=30)[key]
    assert result == TransferResult(key, False, UnavailableReason.MISSING, 0, 0.0, None)


def test_loads_beyond_the_budget_fail_and_the_rest_arrives(tmp_path, store):
    small = ChunkStore(tmp_path, 3 * ONE)
    prefetcher = ThreadPrefetcher(small, threads=4)
    prefetcher.start(to_host(*MANY))
    results = prefetcher.wait([identity.key for identity in MANY], timeout_s=30).values()
    assert sorted(result.reason or "" for result in results) == [""] * 3 + ["host_budget"] * 5
    assert small.host_bytes_used == 3 * ONE
    prefetcher.close()


def test_a_queued_transfer_can_be_cancelled_and_started_again(store, prefetcher):
    prefetcher.start(to_host(*MANY))
    last = MANY[-1]
    assert prefetcher.cancel(last.key)
    assert not prefetcher.cancel(last.key)
    assert not prefetcher.cancel(identity_of(999).key)
    assert [result.reason for result in prefetcher.poll()] == [UnavailableReason.CANCELLED]
    store.gate.set()
    prefetcher.wait([identity.key for identity in MANY], timeout_s=30)
    assert store.loads == len(MANY) - 1
    prefetcher.start(to_host(last))
    assert prefetcher.wait([last.key], timeout_s=30)[last.key].ok


def test_a_chunk_ordered_again_is_not_told_of_before_it_has_ended_again(store, prefetcher):
    prefetcher.start(to_host(*MANY))
    prefetcher.cancel(MANY[-1].key)
    prefetcher.start(to_host(MANY[-1]))
    assert prefetcher.poll() == []
    store.gate.set()
    prefetcher.wait([MANY[-1].key], timeout_s=30)
    assert all(result.ok for result in prefetcher.poll())


def test_an_unexpected_failure_still_ends_the_transfer(store, prefetcher, caplog):
    store.gate.set()
    store.close()
    prefetcher.start(to_host(MANY[0]))
    result = prefetcher.wait([MANY[0].key], timeout_s=30)[MANY[0].key]
    assert (result.ok, result.reason) == (False, UnavailableReason.UNREADABLE)
    assert "failed" in caplog.text


@pytest.fixture
def reading(store):
    """A prefetcher of one thread that is reading the first chunk; the others are queued."""
    prefetcher = ThreadPrefetcher(store, threads=1)
    prefetcher.start(to_host(*MANY))
    while not store.loads:
        threading.Event().wait(0.001)
    yield prefetcher
    store.gate.set()
    prefetcher.close()


def test_a_chunk_called_off_while_it_is_read_gives_its_room_back_and_is_not_shown(store, reading):
    key = MANY[0].key
    assert reading.cancel(key)
    assert not reading.cancel(key)
    assert reading.wait([key], timeout_s=0) == {}, "its room is taken until the read has ended"
    store.gate.set()
    assert reading.wait([key], timeout_s=30)[key] == TransferResult.failed(key, UnavailableReason.CANCELLED)
    reading.wait([identity.key for identity in MANY], timeout_s=30)
    assert store.lookup(MANY[0]) is Tier.DISK
    assert store.host_bytes_used == (len(MANY) - 1) * ONE
    reading.start(to_host(MANY[0]))
    assert reading.wait([key], timeout_s=30)[key].ok


def test_a_chunk_wanted_again_while_it_is_being_called_off_arrives_by_the_same_load(store, reading):
    key = MANY[0].key
    assert reading.cancel(key)
    reading.start(to_host(MANY[0]))
    store.gate.set()
    assert reading.wait([key], timeout_s=30)[key].ok
    reading.wait([identity.key for identity in MANY], timeout_s=30)
    assert store.loads == len(MANY)


def test_a_chunk_wanted_again_while_it_is_being_dropped_is_loaded_again(store, reading, monkeypatch):
    evict = store.evict

    def evict_and_want_again(key, tier):
        freed = evict(key, tier)
        reading.start(to_host(MANY[0]))
        return freed

    monkeypatch.setattr(store, "evict", evict_and_want_again)
    key = MANY[0].key
    assert reading.cancel(key)
    store.gate.set()
    assert reading.wait([key], timeout_s=30)[key].ok
    assert store.lookup(MANY[0]) is Tier.HOST


def test_a_chunk_that_was_on_the_host_before_stays_when_its_load_is_called_off(store, reading):
    store.put(sample(MANY[0].token_ids[0]))
    assert reading.cancel(MANY[0].key)
    store.gate.set()
    reading.wait([MANY[0].key], timeout_s=30)
    assert store.lookup(MANY[0]) is Tier.HOST


def test_closing_calls_everything_off_and_refuses_more(store, reading):
    closing = threading.Thread(target=reading.close)
    closing.start()
    waited = reading.wait([identity.key for identity in MANY[1:]], timeout_s=30)
    assert {result.reason for result in waited.values()} == {UnavailableReason.CANCELLED}
    assert closing.is_alive(), "it waits for what is being read"
    store.gate.set()
    closing.join(30)
    reading.close()
    assert reading.wait([MANY[0].key], timeout_s=0)[MANY[0].key].reason is UnavailableReason.CANCELLED
    assert store.host_bytes_used == 0
    with pytest.raises(StoreError):
        reading.start(to_host(*MANY))


def test_a_thread_prefetcher_refuses_orders_to_a_gpu(store, prefetcher):
    orders = [*to_host(MANY[0]), TransferOrder(MANY[1], Tier.GPU)]
    with pytest.raises(StoreError, match="gpu"):
        prefetcher.start(orders)
    assert prefetcher.in_flight() == 0


def test_a_prefetcher_needs_a_thread(store):
    with pytest.raises(StoreError):
        ThreadPrefetcher(store, threads=0)


def test_reasons_read_well():
    error = ChunkUnavailable("ab" * 32, UnavailableReason.CHECKSUM, "its checksum does not fit")
    assert str(error) == "chunk abababababab is unavailable (checksum): its checksum does not fit"
