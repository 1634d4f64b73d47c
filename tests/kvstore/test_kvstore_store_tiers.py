"""A store over all four tiers, the remote a real server."""

from __future__ import annotations

import time

import pytest
from kvstore_samples import FINGERPRINT, chunk_of, identity_of, reserve, same, sample
from redis_server import RedisServer

from kvstore import (
    ChunkStore,
    ChunkUnavailable,
    Evicted,
    GpuPool,
    Published,
    PutReport,
    Quarantined,
    ShardLayout,
    StoreError,
    Tier,
    UnavailableReason,
)
from kvstore.remote import RemoteTier

ONE = sample(0).nbytes
PLENTY = 100 * ONE
IDENTITY = identity_of(1)
KEY = IDENTITY.key


@pytest.fixture
def make_store(server, tmp_path):
    stores = []

    def make(root=tmp_path, host=PLENTY, gpu=2 * ONE, **options) -> ChunkStore:
        options.setdefault("remote", RemoteTier(server.url, timeout_s=20))
        stores.append(ChunkStore(root, host, gpu=GpuPool(gpu, "cpu"), **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store):
    return make_store()


@pytest.fixture
def elsewhere(make_store, tmp_path_factory):
    """A store on another machine: it shares the remote alone."""
    return make_store(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def without_a_server(make_store):
    """A store without a disk whose remote is a port that nobody listens on."""
    return make_store(root=None, remote=RemoteTier("redis://127.0.0.1:1/0", timeout_s=1))


def promote(store: ChunkStore, seed: int) -> None:
    reserve(store.gpu, sample(seed)).copy_(store.get(identity_of(seed)).kv)
    store.publish_on_gpu(identity_of(seed))


def followed(store: ChunkStore) -> list:
    events: list = []
    store.subscribe(events.append)
    return events


def found(store: ChunkStore):
    return store.find(FINGERPRINT, IDENTITY.token_ids, [(1,)])


def reason_of(call, *arguments) -> UnavailableReason:
    with pytest.raises(ChunkUnavailable) as caught:
        call(*arguments)
    return caught.value.reason


def damage_on_remote(server: RedisServer) -> None:
    with server.client() as client:
        (place,) = client.keys("*")
        field = next(name for name in client.hkeys(place) if name != b"head")
        value = client.hget(place, field)
        client.hset(place, field, value[:-1] + bytes([value[-1] ^ 1]))


def test_a_chunk_is_served_from_the_fastest_tier_that_has_it(store):
    events = followed(store)
    assert store.put(sample(1)) == PutReport(on_disk=True, on_host=True, reason=None, on_remote=True)
    promote(store, 1)
    assert store.records()[0].tiers == frozenset(Tier)
    for tier in Tier:
        assert store.lookup(IDENTITY) is tier
        assert same(store.get(IDENTITY), sample(1))
        assert store.fetch(IDENTITY)[1] is tier
        assert store.evict(KEY, tier) > 0
        assert store.evict(KEY, tier) == 0
    assert store.lookup(IDENTITY) is None
    assert reason_of(store.get, IDENTITY) is UnavailableReason.EVICTED
    put = [Published(KEY, tier, ONE, 4) for tier in (Tier.DISK, Tier.HOST, Tier.REMOTE, Tier.GPU)]
    assert events == put + [Evicted(KEY, tier, ONE) for tier in Tier]


def test_what_one_memory_tier_holds_is_had_from_there_alone(store):
    chunk = sample(1)
    assert store.held(chunk.identity, Tier.HOST) is None
    store.put(chunk)
    assert same(store.held(chunk.identity, Tier.HOST), chunk)
    assert store.held(chunk.identity, Tier.GPU) is None
    store.evict(chunk.identity.key, Tier.HOST)
    assert store.lookup(chunk.identity) is Tier.DISK
    assert store.held(chunk.identity, Tier.HOST) is None


def test_a_chunk_on_the_gpu_is_published_once_its_copy_is_done_and_not_before(store):
    store.put(sample(1))
    room = reserve(store.gpu, sample(1))
    assert store.lookup(IDENTITY) is Tier.HOST
    room.copy_(store.get(IDENTITY).kv)
    store.publish_on_gpu(IDENTITY)
    assert store.lookup(IDENTITY) is Tier.GPU
    assert store.get(IDENTITY).kv.data_ptr() == room.data_ptr()
    with pytest.raises(StoreError):
        store.publish_on_gpu(IDENTITY)


def test_a_chunk_is_read_from_disk_straight_into_its_room_on_the_host(make_store, monkeypatch):
    make_store().put(sample(1))
    store = make_store()
    rooms = []
    take = store._host.reserve

    def reserve_and_look(*arguments):
        rooms.append(take(*arguments))
        return rooms[-1]

    monkeypatch.setattr(store._host, "reserve", reserve_and_look)
    assert store.load(IDENTITY).tier_from is Tier.DISK
    assert [store.get(IDENTITY).kv.data_ptr()] == [room.data_ptr() for room in rooms]


def test_what_the_disk_does_not_have_is_loaded_from_the_remote_and_not_written_to_disk(store, elsewhere):
    elsewhere.put(sample(1))
    events = followed(store)
    assert store.lookup(IDENTITY) is None
    report = store.load(IDENTITY)
    assert (report.nbytes, report.tier_from) == (ONE, Tier.REMOTE)
    assert same(store.get(IDENTITY), sample(1))
    assert store.records()[0].tiers == {Tier.HOST, Tier.REMOTE}
    assert list(store.disk.files()) == []
    assert events == [Published(KEY, Tier.REMOTE, ONE, 4), Published(KEY, Tier.HOST, ONE, 4)]
    store.evict(KEY, Tier.HOST)
    assert same(store.get(IDENTITY), sample(1)), "read through"


def test_look_up_asks_no_server_and_looking_at_the_remote_enters_what_it_has(store, elsewhere, server):
    elsewhere.put(sample(1))
    server.pause()
    try:
        assert store.lookup(IDENTITY) is None
        assert found(store) == (None, UnavailableReason.MISSING)
    finally:
        server.resume()
    assert store.look_remote([identity_of(50), IDENTITY]) == [IDENTITY]
    assert store.lookup(IDENTITY) is Tier.REMOTE
    assert found(store) == (IDENTITY, None)


def test_what_the_remote_does_not_have_is_asked_for_once_until_the_next_refresh(store, elsewhere):
    assert store.look_remote([IDENTITY]) == []
    elsewhere.put(sample(1))
    assert store.look_remote([IDENTITY]) == [], "it is not asked again"
    store.refresh()
    assert store.look_remote([IDENTITY]) == [IDENTITY]


def test_what_left_the_remote_is_not_offered_once_that_was_noticed(store, elsewhere):
    elsewhere.put(sample(1))
    store.look_remote([IDENTITY])
    events = followed(store)
    elsewhere.evict(KEY, Tier.REMOTE)
    assert reason_of(store.load, IDENTITY) is UnavailableReason.EVICTED
    assert store.lookup(IDENTITY) is None
    assert store.host_bytes_used == 0
    assert events == [Evicted(KEY, Tier.REMOTE, ONE)]


def test_a_damaged_file_is_quarantined_and_the_remote_serves_the_chunk(make_store):
    make_store().put(sample(1))
    store = make_store(host=ONE)
    path = store.disk.path_of(KEY, FINGERPRINT, store.shard)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert store.load(IDENTITY).tier_from is Tier.REMOTE
    assert same(store.get(IDENTITY), sample(1))
    assert store.host_bytes_used == ONE, "the room of the first try was given back"
    assert len(store.disk.quarantined()) == 2


def test_a_damaged_chunk_on_the_remote_is_removed_and_never_served(store, elsewhere, server):
    elsewhere.put(sample(1))
    damage_on_remote(server)
    store.look_remote([IDENTITY])
    events = followed(store)
    assert reason_of(store.load, IDENTITY) is UnavailableReason.CHECKSUM
    assert store.host_bytes_used == 0
    assert [type(event) for event in events] == [Quarantined, Evicted]
    assert found(store) == (None, UnavailableReason.CHECKSUM)
    with server.client() as client:
        assert client.keys("*") == []
    elsewhere.put(sample(1))
    store.refresh()
    assert store.look_remote([IDENTITY]) == [IDENTITY]


def test_a_remote_that_cannot_be_reached_is_a_reason_and_never_an_error(without_a_server):
    store = without_a_server
    report = store.put(sample(1))
    assert (report.on_host, report.reason) == (True, None)
    assert (report.on_remote, report.remote_reason) == (False, UnavailableReason.UNREACHABLE)
    assert store.look_remote([identity_of(50)]) == []
    missing = store.find(FINGERPRINT, identity_of(50).token_ids, [(1,)])
    assert missing == (None, UnavailableReason.UNREACHABLE)
    assert reason_of(store.load, identity_of(50)) is UnavailableReason.UNREACHABLE
    assert store.evict(KEY, Tier.REMOTE) == 0
    assert same(store.get(IDENTITY), sample(1))


def test_a_reason_of_the_remote_is_forgotten_when_it_answers_again(make_store, tmp_path):
    server = RedisServer(tmp_path).start()
    server.kill()
    remote = RemoteTier(server.url, timeout_s=20)
    store = make_store(root=None, remote=remote)
    assert reason_of(store.load, IDENTITY) is UnavailableReason.UNREACHABLE
    assert found(store) == (None, UnavailableReason.UNREACHABLE)
    server.start()
    give_up = time.monotonic() + 30
    while reason_of(store.load, IDENTITY) is UnavailableReason.UNREACHABLE and time.monotonic() < give_up:
        time.sleep(0.01)
    server.kill()
    assert found(store) == (None, UnavailableReason.MISSING)


def test_the_remote_can_be_written_later_than_the_rest(store):
    assert store.put(sample(1), remote=False) == PutReport(True, True, None)
    assert Tier.REMOTE not in store.records()[0].tiers
    assert store.put_on_remote(sample(1)) == (True, None)
    assert Tier.REMOTE in store.records()[0].tiers


def test_a_sharded_chunk_is_on_the_remote_once_every_rank_has_put_it(make_store):
    ranks = ShardLayout(0, 2).all_ranks()
    first, second = (make_store(root=None, shard=shard, host=0) for shard in ranks)
    assert first.put(chunk_of(IDENTITY, ranks[0])).on_remote
    assert first.lookup(IDENTITY) is None
    assert second.put(chunk_of(IDENTITY, ranks[1])).on_remote
    assert second.lookup(IDENTITY) is Tier.REMOTE
    first.refresh()
    assert first.look_remote([IDENTITY]) == [IDENTITY]
    assert same(first.get(IDENTITY), chunk_of(IDENTITY, ranks[0]))


@pytest.mark.parametrize("tier", list(Tier))
def test_a_pinned_chunk_leaves_each_of_the_four_tiers_only_with_its_last_pin(store, tier):
    store.put(sample(1))
    promote(store, 1)
    with store.pin([KEY]):
        inner = store.pin([KEY])
        assert store.evict(KEY, tier) == 0
        inner.release()
        assert tier in store.records()[0].tiers
    assert store.records()[0].tiers == frozenset(Tier) - {tier}


def test_memory_on_the_gpu_is_given_to_nobody_before_what_a_released_pin_waits_for(make_store):
    class Queued:
        over = False

        def query(self) -> bool:
            return self.over

    store, blend = make_store(gpu=ONE), Queued()
    store.put(sample(1))
    promote(store, 1)
    handle = store.pin([KEY])
    store.evict(KEY, Tier.GPU)
    handle.release(after=blend)
    assert store.lookup(IDENTITY) is Tier.HOST
    assert store.gpu.bytes_used == ONE
    blend.over = True
    assert store.gpu.bytes_used == 0


def test_budgets_of_both_memory_tiers_change_at_run_time(store):
    store.put(sample(1))
    store.set_budget(Tier.HOST, ONE)
    store.set_budget(Tier.GPU, 3 * ONE)
    assert (store.host_budget_bytes, store.gpu.budget_bytes) == (ONE, 3 * ONE)
    assert not store.put(sample(50)).on_host
    assert reason_of(store.load, identity_of(50)) is UnavailableReason.HOST_BUDGET
    store.set_budget(Tier.HOST, 2 * ONE)
    assert store.load(identity_of(50)).nbytes == ONE
    for tier in (Tier.DISK, Tier.REMOTE):
        with pytest.raises(StoreError, match="no memory tier"):
            store.set_budget(tier, ONE)


def test_a_store_without_a_pool_has_none_to_publish_in_or_to_budget():
    store = ChunkStore(None, 0)
    for call, *arguments in ((store.publish_on_gpu, IDENTITY), (store.set_budget, Tier.GPU, 1)):
        with pytest.raises(StoreError, match="no memory tier 'gpu'"):
            call(*arguments)


def test_a_closed_store_gives_the_memory_of_both_tiers_back(store):
    store.put(sample(1))
    promote(store, 1)
    store.close()
    assert (store.host_bytes_used, store.gpu.bytes_used) == (0, 0)
    with pytest.raises(StoreError, match="closed"):
        store.publish_on_gpu(IDENTITY)
