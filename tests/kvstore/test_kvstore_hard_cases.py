"""Cases that broke other stores."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvstore_samples import chunk_of, identity_of, same, sample

from kvstore import ChunkStore, ChunkUnavailable, StoreError, Tier, UnavailableReason

ONE = sample(0).nbytes
PLENTY = 100 * ONE
IDENTITY = identity_of(1)
KEY = IDENTITY.key


@pytest.fixture
def store(tmp_path):
    ChunkStore(tmp_path, 0).put(sample(1))
    return ChunkStore(tmp_path, PLENTY)


def test_a_store_written_while_it_is_read(tmp_path, store):
    """Writers replace and evict the chunk: a reader gets all of it, or hears that it is gone."""
    others = [ChunkStore(tmp_path, 0) for _ in range(2)]
    done = threading.Event()
    outcomes: set[str] = set()

    def write(other: ChunkStore) -> None:
        for turn in range(40):
            assert other.put(sample(1)).on_disk
            if turn % 3 == 2:
                other.evict(KEY, Tier.DISK)
        other.put(sample(1))

    def read() -> None:
        while not done.is_set():
            store.refresh()
            for call in (store.get, store.load):
                try:
                    call(IDENTITY)
                    assert same(store.get(IDENTITY), sample(1))
                    outcomes.add("read")
                except ChunkUnavailable as error:
                    outcomes.add(error.reason)
            store.evict(KEY, Tier.HOST)

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for writer in [pool.submit(write, other) for other in others]:
            writer.result(timeout=60)
        done.set()
        for reader in readers:
            reader.result(timeout=60)
    assert "read" in outcomes
    assert outcomes <= {"read", UnavailableReason.MISSING, UnavailableReason.EVICTED}
    assert store.disk.quarantined() == []
    store.refresh()
    assert same(store.get(IDENTITY), sample(1))


def test_evicted_between_look_up_and_retrieval(store):
    """The next tier serves it; when there is none, the reason says so."""
    store.load(IDENTITY)
    assert store.lookup(IDENTITY) is Tier.HOST
    store.evict(KEY, Tier.HOST)
    assert same(store.get(IDENTITY), sample(1))
    assert store.lookup(IDENTITY) is Tier.DISK
    store.evict(KEY, Tier.DISK)
    for call in (store.get, store.load):
        with pytest.raises(ChunkUnavailable) as caught:
            call(IDENTITY)
        assert caught.value.reason is UnavailableReason.EVICTED
    assert store.host_bytes_used == 0


def test_a_pin_between_look_up_and_retrieval_keeps_the_chunk_where_it_was_found(store):
    store.load(IDENTITY)
    with store.pin([KEY]):
        assert store.lookup(IDENTITY) is Tier.HOST
        for tier in (Tier.HOST, Tier.DISK):
            assert store.evict(KEY, tier) == 0
        assert store.lookup(IDENTITY) is Tier.HOST
        assert same(store.get(IDENTITY), sample(1))
    assert store.lookup(IDENTITY) is None


def test_unpinned_twice(store):
    """The second release is an error, and takes nobody else's pin."""
    mine, theirs = store.pin([KEY]), store.pin([KEY])
    mine.release()
    with pytest.raises(StoreError, match="given back once"):
        mine.release()
    assert store.pinned_count() == 1
    store.load(IDENTITY)
    assert store.evict(KEY, Tier.HOST) == 0
    theirs.release()
    assert store.pinned_count() == 0
    assert store.lookup(IDENTITY) is Tier.DISK


def test_no_free_host_memory(tmp_path):
    """A load is refused before a byte of the tensor is read, what is there stays, and reading through goes on."""
    store = ChunkStore(tmp_path, ONE)
    store.put(sample(1))
    store.put(sample(50))
    with pytest.raises(ChunkUnavailable) as caught:
        store.load(identity_of(50))
    assert caught.value.reason is UnavailableReason.HOST_BUDGET
    assert store.host_bytes_used == ONE
    assert same(store.get(IDENTITY), sample(1))
    assert same(store.get(identity_of(50)), sample(50))
    store.evict(KEY, Tier.HOST)
    assert store.load(identity_of(50)).nbytes == ONE


def test_the_same_chunk_requested_by_64_requests_at_once(store, monkeypatch):
    """One load, one copy in memory, and everyone has it."""
    reads, start = [], threading.Barrier(64)
    read = store.disk.read

    def count(*arguments):
        reads.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(store.disk, "read", count)

    def ask() -> int:
        start.wait()
        with store.pin([KEY]):
            nbytes = store.load(IDENTITY).nbytes
            assert same(store.get(IDENTITY), chunk_of(IDENTITY))
        return nbytes

    with ThreadPoolExecutor(64) as pool:
        moved = [asker.result(timeout=60) for asker in [pool.submit(ask) for _ in range(64)]]
    assert len(reads) == 1
    assert sum(moved) == ONE
    assert store.host_bytes_used == ONE
    assert store.pinned_count() == 0
