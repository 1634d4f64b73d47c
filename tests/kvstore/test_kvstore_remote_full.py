"""A server that is full, drops chunks or takes none: what is not kept whole is not there, and is told."""

from __future__ import annotations

import itertools

import pytest
from kvstore_samples import FINGERPRINT, ONE_RANK, identity_of, same, sample
from redis_server import Relay, free_port, servers
from remote_samples import LARGE, PLENTY_S, failure, large, reason_of

from kvstore import ChunkUnavailable, UnavailableReason, remote
from kvstore.remote import RemoteTier


@pytest.fixture
def start(tmp_path):
    with servers(tmp_path) as start:
        yield start


def refusal_of(call, *arguments) -> UnavailableReason | None:
    try:
        call(*arguments)
    except ChunkUnavailable as error:
        return error.reason
    return None


def test_a_full_server_is_disk_full_and_nothing_half_is_left(start):
    server = start(maxmemory=str(3 * LARGE), **{"maxmemory-policy": "noeviction"})
    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    refusals = (refusal_of(tier.put, large(seed)) for seed in itertools.count())
    kept, refused = next((seed, refusal) for seed, refusal in enumerate(refusals) if refusal)
    assert refused is UnavailableReason.DISK_FULL
    assert kept >= 1
    assert tier.holds(identity_of(kept), ONE_RANK) is None
    assert server.drafts() == []
    for seed in range(kept):
        assert same(tier.read(identity_of(seed), ONE_RANK), large(seed))
    tier.delete(identity_of(0).key, FINGERPRINT, [ONE_RANK])
    tier.put(large(kept))
    assert same(tier.read(identity_of(kept), ONE_RANK), large(kept))


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_drops_chunks_serves_the_others_whole(start, policy):
    """It may drop the one that is being written, too: that is told, and nothing of it is seen."""
    server = start(maxmemory=str(4 * LARGE), **{"maxmemory-policy": policy})
    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    for seed in range(12):
        refusal = refusal_of(tier.put, large(seed))
        assert refusal in {None, UnavailableReason.DISK_FULL}
        if refusal:
            assert tier.holds(identity_of(seed), ONE_RANK) is None
    held = [seed for seed in range(12) if tier.holds(identity_of(seed), ONE_RANK)]
    assert 1 <= len(held) <= 4
    assert server.drafts() == []
    for seed in range(12):
        if seed in held:
            assert same(tier.read(identity_of(seed), ONE_RANK), large(seed))
        else:
            assert reason_of(tier.read, identity_of(seed), ONE_RANK) is UnavailableReason.MISSING


def test_a_chunk_whose_first_parts_are_dropped_while_its_last_are_written_is_not_published(start):
    server = start()

    def drop():
        with server.client() as client:
            assert client.delete(*server.drafts()) == 1

    relay = Relay(server.port, drop, to_server=LARGE * 3 // 4, ends=False)
    tier = RemoteTier(relay.url, timeout_s=PLENTY_S)
    assert reason_of(tier.put, large(1)) is UnavailableReason.DISK_FULL
    assert tier.holds(identity_of(1), ONE_RANK) is None
    assert server.drafts() == []
    tier.put(large(1))
    assert same(tier.read(identity_of(1), ONE_RANK), large(1))
    relay.close()


def test_a_chunk_that_is_dropped_just_before_it_is_published_is_told_as_well(start, monkeypatch):
    server = start()
    write = remote._write

    def write_and_drop(talk, draft, head, value):
        whole = write(talk, draft, head, value)
        with server.client() as client:
            assert client.delete(draft) == 1
        return whole

    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    tier.put(sample(1))
    monkeypatch.setattr(remote, "_write", write_and_drop)
    assert reason_of(tier.put, sample(1)) is UnavailableReason.DISK_FULL
    assert same(tier.read(identity_of(1), ONE_RANK), sample(1))


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "noeviction"])
def test_a_chunk_larger_than_the_server_is_disk_full_and_nothing_half_is_left(start, policy):
    server = start(maxmemory=str(9 << 20), **{"maxmemory-policy": policy})
    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    assert reason_of(tier.put, large(1, nbytes=40 << 20)) is UnavailableReason.DISK_FULL
    assert tier.holds(identity_of(1), ONE_RANK) is None
    assert server.drafts() == []


def test_a_server_that_takes_no_writes_is_unwritable(start):
    server = start()
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", free_port())
    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    error = failure(tier.put, sample(1))
    assert error.reason is UnavailableReason.UNWRITABLE
    assert "refuses" in str(error)
    assert tier.delete(identity_of(1).key, FINGERPRINT, [ONE_RANK]) == 0
    assert tier.holds(identity_of(1), ONE_RANK) is None
