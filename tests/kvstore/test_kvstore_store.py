from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvstore_samples import FINGERPRINT, ONE_RANK, chunk_of, identity_of, same, sample

from kvstore import (
    ChunkIdentity,
    ChunkRecord,
    ChunkStore,
    ChunkUnavailable,
    Evicted,
    NotStored,
    Published,
    PutReport,
    Quarantined,
    ShardLayout,
    StoreError,
    Tier,
    UnavailableReason,
)

ONE = sample(0).nbytes
PLENTY = 100 * ONE


def path_in(store: ChunkStore, identity: ChunkIdentity, shard: ShardLayout = ONE_RANK):
    return store.disk.path_of(identity.key, identity.fingerprint, shard)


def flip(path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def reason_of(call, *arguments) -> UnavailableReason:
    with pytest.raises(ChunkUnavailable) as caught:
        call(*arguments)
    return caught.value.reason


def test_a_chunk_is_kept_on_both_tiers_and_served(tmp_path):
    store = ChunkStore(tmp_path, PLENTY)
    assert store.lookup(identity_of(1)) is None
    assert store.put(sample(1)) == PutReport(on_disk=True, on_host=True, reason=None)
    assert store.lookup(identity_of(1)) is Tier.HOST
    assert same(store.get(identity_of(1)), sample(1))
    assert store.records() == [ChunkRecord(identity_of(1).key, ONE, 4, frozenset({Tier.HOST, Tier.DISK}))]


def test_a_new_process_finds_what_was_kept_on_disk(tmp_path):
    ChunkStore(tmp_path, PLENTY).put(sample(1))
    store = ChunkStore(tmp_path, PLENTY)
    assert store.lookup(identity_of(1)) is Tier.DISK
    assert same(store.get(identity_of(1)), sample(1))
    assert store.host_bytes_used == 0


def test_a_store_without_a_disk_serves_from_memory_alone():
    store = ChunkStore(None, ONE)
    assert store.put(sample(1)) == PutReport(on_disk=False, on_host=True, reason=None)
    assert store.put(sample(2)) == PutReport(False, False, UnavailableReason.HOST_BUDGET)
    assert same(store.get(identity_of(1)), sample(1))
    assert reason_of(store.get, identity_of(2)) is UnavailableReason.MISSING
    assert reason_of(store.load, identity_of(2)) is UnavailableReason.MISSING
    store.refresh()


def test_a_budget_smaller_than_one_chunk_still_serves_from_disk(tmp_path):
    store = ChunkStore(tmp_path, ONE - 1)
    assert store.put(sample(1)) == PutReport(on_disk=True, on_host=False, reason=None)
    assert same(store.get(identity_of(1)), sample(1))
    assert reason_of(store.load, identity_of(1)) is UnavailableReason.HOST_BUDGET
    assert store.host_bytes_used == 0
    assert store.lookup(identity_of(1)) is Tier.DISK


def test_loading_brings_a_chunk_from_disk_to_the_host(tmp_path):
    ChunkStore(tmp_path, 0).put(sample(1))
    store = ChunkStore(tmp_path, PLENTY)
    report = store.load(identity_of(1))
    assert (report.nbytes, report.tier_from) == (ONE, Tier.DISK)
    assert store.lookup(identity_of(1)) is Tier.HOST
    again = store.load(identity_of(1))
    assert (again.nbytes, again.tier_from) == (0, Tier.HOST)
    assert same(store.get(identity_of(1)), sample(1))


def test_find_tries_the_prefixes_in_order_and_says_why_none_hits(tmp_path):
    store = ChunkStore(tmp_path, PLENTY)
    ids, system, bos = (5, 6, 7, 8), (1, 50, 51), (1,)
    store.put(chunk_of(ChunkIdentity(FINGERPRINT, bos, ids)))
    assert store.find(FINGERPRINT, ids, [system, bos]) == (ChunkIdentity(FINGERPRINT, bos, ids), None)
    store.put(chunk_of(ChunkIdentity(FINGERPRINT, system, ids)))
    assert store.find(FINGERPRINT, ids, [system, bos]) == (ChunkIdentity(FINGERPRINT, system, ids), None)
    assert store.find(FINGERPRINT, ids, [(2,), ()]) == (None, UnavailableReason.PREFIX_CHANGED)
    assert store.find(FINGERPRINT, (5, 6), [bos]) == (None, UnavailableReason.MISSING)
    assert store.find("other", ids, [bos]) == (None, UnavailableReason.OTHER_MODEL)
    for prefix in (system, bos):
        for tier in (Tier.HOST, Tier.DISK):
            store.evict(ChunkIdentity(FINGERPRINT, prefix, ids).key, tier)
    assert store.find(FINGERPRINT, ids, [(2,)]) == (None, UnavailableReason.MISSING)


def test_a_flipped_byte_is_quarantined_and_never_served(tmp_path):
    ChunkStore(tmp_path, 0).put(sample(1))
    store = ChunkStore(tmp_path, PLENTY)
    events = []
    store.subscribe(events.append)
    flip(path_in(store, identity_of(1)), -1)
    assert reason_of(store.load, identity_of(1)) is UnavailableReason.CHECKSUM
    assert store.host_bytes_used == 0
    assert store.lookup(identity_of(1)) is None
    assert store.records() == []
    assert not path_in(store, identity_of(1)).exists()
    quarantined = tmp_path / "quarantine" / path_in(store, identity_of(1)).name
    assert quarantined.with_suffix(".reason").read_text().startswith("checksum: ")
    assert [type(event) for event in events] == [Quarantined, Evicted]
    assert events[0].reason is UnavailableReason.CHECKSUM
    assert store.find(FINGERPRINT, identity_of(1).token_ids, [(1,)]) == (None, UnavailableReason.CHECKSUM)
    assert reason_of(store.get, identity_of(1)) is UnavailableReason.CHECKSUM
    store.put(sample(1))
    assert same(store.get(identity_of(1)), sample(1))


def test_a_file_truncated_before_opening_is_quarantined_with_its_reason(tmp_path):
    ChunkStore(tmp_path, 0).put(sample(1))
    path = path_in(ChunkStore(tmp_path, 0), identity_of(1))
    path.write_bytes(path.read_bytes()[:-1])
    store = ChunkStore(tmp_path, PLENTY)
    assert store.find(FINGERPRINT, identity_of(1).token_ids, [(1,)]) == (None, UnavailableReason.TRUNCATED)
    assert not path.exists()
    assert len(store.disk.quarantined()) == 2


def test_a_file_of_another_format_version_is_left_alone_and_named_as_the_reason(tmp_path):
    ChunkStore(tmp_path, 0).put(sample(1))
    path = path_in(ChunkStore(tmp_path, 0), identity_of(1))
    path.write_bytes(path.read_bytes().replace(b'"version":"2"', b'"version":"9"'))
    store = ChunkStore(tmp_path, PLENTY)
    assert store.lookup(identity_of(1)) is None
    assert store.find(FINGERPRINT, identity_of(1).token_ids, [(1,)]) == (
        None,
        UnavailableReason.FORMAT_VERSION,
    )
    assert path.exists()


def test_an_unwritable_folder_is_reported_and_serving_goes_on_from_the_host(tmp_path):
    store = ChunkStore(tmp_path, PLENTY)
    events = []
    store.subscribe(events.append)
    (tmp_path / FINGERPRINT[:16]).write_text("in the way")
    assert store.put(sample(1)) == PutReport(False, True, UnavailableReason.UNWRITABLE)
    key = identity_of(1).key
    assert events == [NotStored(key, UnavailableReason.UNWRITABLE), Published(key, Tier.HOST, ONE, 4)]
    assert store.lookup(identity_of(1)) is Tier.HOST
    assert same(store.get(identity_of(1)), sample(1))


def test_a_full_disk_is_reported_and_serving_goes_on_from_the_host(tmp_path, run_python):
    code = (
        "import resource, sys; from pathlib import Path; from kvstore import ChunkStore\n"
        "from kvstore_samples import *\n"
        "store = ChunkStore(Path(sys.argv[1]), 10**6)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))\n"
        "report = store.put(sample(2))\n"
        "print(report.on_disk, report.on_host, report.reason, same(store.get(identity_of(2)), sample(2)))"
    )
    assert run_python(code, tmp_path).split() == ["False", "True", "disk_full", "True"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="name a folder"):
        ChunkStore(tmp_path / "file", 0)
    with pytest.raises(StoreError, match="name another folder"):
        ChunkStore("/proc/cacheblend-cache", 0, require_writable=True)


def test_an_evicted_chunk_is_gone_and_says_so(tmp_path):
    store = ChunkStore(tmp_path, PLENTY)
    store.put(sample(1))
    key = identity_of(1).key
    size = path_in(store, identity_of(1)).stat().st_size
    assert store.evict(key, Tier.HOST) == ONE
    assert store.evict(key, Tier.HOST) == 0
    assert store.lookup(identity_of(1)) is Tier.DISK
    assert store.evict(key, Tier.DISK) == size
    assert store.evict(key, Tier.DISK) == 0
    assert store.lookup(identity_of(1)) is None
    assert reason_of(store.get, identity_of(1)) is UnavailableReason.EVICTED


def test_a_chunk_that_another_process_removed_is_gone_and_says_so(tmp_path):
    store = ChunkStore(tmp_path, PLENTY)
    store.put(sample(1))
    store.evict(identity_of(1).key, Tier.HOST)
    path_in(store, identity_of(1)).unlink()
    assert reason_of(store.get, identity_of(1)) is UnavailableReason.EVICTED
    assert store.lookup(identity_of(1)) is None


def test_the_store_evicts_only_from_its_own_tiers():
    with pytest.raises(StoreError):
        ChunkStore(None, 0).evict(identity_of(1).key, Tier.GPU)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_pinned_chunk_stays_on_every_tier_until_its_last_pin_goes(tmp_path, tier):
    store = ChunkStore(tmp_path, PLENTY)
    store.put(sample(1))
    key = identity_of(1).key
    with store.pin([key, key]) as outer:
        inner = store.pin([key])
        assert store.pinned_count() == 1
        assert store.evict(key, tier) == 0
        inner.release()
        assert tier in store.records()[0].tiers
    assert tier not in store.records()[0].tiers
    assert store.pinned_count() == 0
    with pytest.raises(StoreError):
        outer.release()


def test_what_another_process_precomputed_becomes_visible_by_refreshing(tmp_path, run_python):
    store = ChunkStore(tmp_path, PLENTY)
    run_python(
        "import sys; from pathlib import Path; from kvstore import ChunkStore\n"
        "from kvstore_samples import *\n"
        "ChunkStore(Path(sys.argv[1]), 0).put(sample(1))",
        tmp_path,
    )
    events = []
    store.subscribe(events.append)
    assert store.lookup(identity_of(1)) is None
    store.refresh()
    assert store.lookup(identity_of(1)) is Tier.DISK
    store.refresh()
    assert events == [Published(identity_of(1).key, Tier.DISK, ONE, 4)]
    store.disk.prune(max_bytes=0)
    store.refresh()
    assert store.lookup(identity_of(1)) is None
    assert events[1:] == [Evicted(identity_of(1).key, Tier.DISK, ONE)]


def test_an_unrefreshed_chunk_can_still_be_loaded(tmp_path):
    store = ChunkStore(tmp_path, PLENTY)
    ChunkStore(tmp_path, 0).put(sample(1))
    assert store.load(identity_of(1)).nbytes == ONE
    assert same(store.get(identity_of(1)), sample(1))


def test_events_tell_of_every_change_in_order_and_may_call_the_store(tmp_path):
    store = ChunkStore(tmp_path, PLENTY)
    seen = []

    def listener(event):
        seen.append((type(event), event.tier, store.lookup(identity_of(1))))
        if isinstance(event, Published) and event.tier is Tier.DISK:
            store.pin([event.key]).release()

    unsubscribe = store.subscribe(listener)
    store.put(sample(1))
    store.evict(identity_of(1).key, Tier.HOST)
    unsubscribe()
    store.evict(identity_of(1).key, Tier.DISK)
    assert [event[:2] for event in seen] == [
        (Published, Tier.DISK),
        (Published, Tier.HOST),
        (Evicted, Tier.HOST),
    ]


def test_a_listener_that_fails_harms_nobody(caplog):
    store, seen = ChunkStore(None, PLENTY), []
    store.subscribe(lambda event: 1 / 0)
    store.subscribe(seen.append)
    store.put(sample(1))
    assert len(seen) == 1
    assert "a listener failed" in caplog.text


def test_a_sharded_chunk_exists_once_every_rank_has_published(tmp_path):
    first, second = (ChunkStore(tmp_path, PLENTY, shard=shard) for shard in ShardLayout(0, 2).all_ranks())
    identity = identity_of(1)
    assert first.put(chunk_of(identity, first.shard)).on_disk
    assert first.lookup(identity) is None
    assert reason_of(first.get, identity) is UnavailableReason.MISSING
    second.put(chunk_of(identity, second.shard))
    assert second.lookup(identity) is None
    for store in (first, second):
        store.refresh()
        assert store.lookup(identity) is Tier.HOST
        assert same(store.get(identity), chunk_of(identity, store.shard))
    assert same(first.get(identity, second.shard), chunk_of(identity, second.shard))


def test_another_tensor_parallel_size_is_a_miss_with_its_reason(tmp_path):
    ChunkStore(tmp_path, 0).put(sample(1))
    store = ChunkStore(tmp_path, PLENTY, shard=ShardLayout(0, 2))
    assert store.lookup(identity_of(1)) is None
    assert store.lookup(identity_of(1), ShardLayout()) is Tier.DISK
    assert store.find(FINGERPRINT, identity_of(1).token_ids, [(1,)]) == (None, UnavailableReason.TP_LAYOUT)
    assert reason_of(store.load, identity_of(1)) is UnavailableReason.TP_LAYOUT


def test_two_askers_of_one_missing_chunk_cause_one_computation(tmp_path):
    store, start, computed = ChunkStore(tmp_path, 0), threading.Barrier(8), []
    identity = identity_of(1)

    def ask() -> None:
        start.wait()
        with store.claim([identity.key]) as claim:
            if claim.mine:
                computed.append(claim.mine)
                store.put(sample(1))
            assert claim.wait() == ()
        assert same(store.get(identity), sample(1))

    with ThreadPoolExecutor(8) as pool:
        for asker in [pool.submit(ask) for _ in range(8)]:
            asker.result(timeout=30)
    assert computed == [(identity.key,)]


def test_parallel_puts_loads_and_evictions_keep_the_account_true(tmp_path, caplog):
    store = ChunkStore(tmp_path, 3 * ONE)
    catalogue: set[tuple[str, Tier]] = set()
    reasons: set[UnavailableReason] = set()

    def follow(event) -> None:
        if isinstance(event, Published):
            assert (event.key, event.tier) not in catalogue
            catalogue.add((event.key, event.tier))
        elif isinstance(event, Evicted):
            catalogue.remove((event.key, event.tier))

    store.subscribe(follow)

    def work(thread: int) -> None:
        for turn in range(30):
            identity = identity_of((thread + turn) % 6 * 10)
            try:
                if turn % 3 == 0:
                    store.put(chunk_of(identity))
                elif turn % 3 == 1:
                    store.load(identity)
                else:
                    assert same(store.get(identity), chunk_of(identity))
            except ChunkUnavailable as error:
                reasons.add(error.reason)
            assert store.host_bytes_used <= 3 * ONE
            store.evict(identity.key, Tier.HOST if turn % 2 else Tier.DISK)

    with ThreadPoolExecutor(6) as pool:
        for worker in [pool.submit(work, thread) for thread in range(6)]:
            worker.result(timeout=60)
    store.refresh()
    records = store.records()
    assert reasons <= {"missing", "evicted", "host_budget"}
    assert catalogue == {(record.key, tier) for record in records for tier in record.tiers}
    assert store.host_bytes_used == ONE * sum(Tier.HOST in record.tiers for record in records)
    assert "a listener failed" not in caplog.text


def test_a_closed_store_gives_its_memory_back_and_refuses_work(tmp_path):
    store = ChunkStore(tmp_path, PLENTY)
    store.put(sample(1))
    handle = store.pin([identity_of(1).key])
    store.close()
    store.close()
    assert store.host_bytes_used == 0
    for call, argument in ((store.put, sample(1)), (store.get, identity_of(1)), (store.load, identity_of(1))):
        with pytest.raises(StoreError):
            call(argument)
    handle.release()


def test_evicting_a_pinned_chunk_that_is_not_on_disk_spares_the_file_another_process_writes_later(tmp_path):
    chunk = sample(0)
    store = ChunkStore(tmp_path, 0)
    handle = store.pin([chunk.identity.key])
    assert store.evict(chunk.identity.key, Tier.DISK) == 0
    ChunkStore(tmp_path, 0).put(chunk)
    store.refresh()
    handle.release()
    assert store.lookup(chunk.identity) is Tier.DISK
