"""What is on the server and is not what was put there is told with a reason and never served."""

from __future__ import annotations

import json

import pytest
from kvstore_samples import ONE_RANK, identity_of, same, sample
from redis_server import servers
from remote_samples import PLENTY_S, failure, key_of, reason_of

from kvstore import ChunkKV, ChunkUnavailable, ShardLayout, UnavailableReason, remote
from kvstore.remote import RemoteTier


@pytest.fixture
def start(tmp_path):
    with servers(tmp_path) as start:
        yield start


def changed(start, change) -> ChunkUnavailable:
    """The failure to read a chunk whose hash something changed; that it can be put again is checked too."""
    server = start()
    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    tier.put(sample(1))
    with server.client() as client:
        change(client, key_of(identity_of(1)))
    error = failure(tier.read, identity_of(1), ONE_RANK)
    tier.put(sample(1))
    assert same(tier.read(identity_of(1), ONE_RANK), sample(1))
    return error


def part_names(client, place: str) -> list[bytes]:
    names = [name for name in client.hkeys(place) if name != b"head"]
    return sorted(names, key=lambda name: int(name.rpartition(b":")[2]))


@pytest.mark.parametrize("kind", ["string", "list"])
def test_something_else_at_the_chunks_place_is_unreadable(start, kind):
    def change(client, place):
        client.delete(place)
        client.set(place, "mine") if kind == "string" else client.rpush(place, "mine")

    error = changed(start, change)
    assert error.reason is UnavailableReason.UNREADABLE
    assert not error.damaged


def flipped(part: int):
    def change(client, place):
        name = part_names(client, place)[part]
        raw = bytearray(client.hget(place, name))
        raw[-1] ^= 0x10
        client.hset(place, name, bytes(raw))

    return change


@pytest.mark.parametrize("part", [-1, -2])
def test_a_flipped_bit_of_the_tensor_is_a_wrong_checksum(start, monkeypatch, part):
    monkeypatch.setattr(remote, "PART_BYTES", 100)
    error = changed(start, flipped(part))
    assert (error.reason, error.damaged) == (UnavailableReason.CHECKSUM, True)


@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_a_flipped_bit_of_the_header_is_not_served(start, monkeypatch, part):
    """What it does depends on where it falls."""
    monkeypatch.setattr(remote, "PART_BYTES", 100)
    error = changed(start, flipped(part))
    assert error.reason in {
        UnavailableReason.CHECKSUM,
        UnavailableReason.UNREADABLE,
        UnavailableReason.TRUNCATED,
        UnavailableReason.FORMAT_VERSION,
    }


@pytest.mark.parametrize("part", [0, 3, -1])
def test_missing_parts_are_truncated(start, monkeypatch, part):
    monkeypatch.setattr(remote, "PART_BYTES", 64)
    error = changed(start, lambda client, place: client.hdel(place, part_names(client, place)[part]))
    assert (error.reason, error.damaged) == (UnavailableReason.TRUNCATED, True)


def test_a_part_that_is_too_short_is_truncated(start):
    def shorten(client, place):
        name = part_names(client, place)[-1]
        client.hset(place, name, client.hget(place, name)[:-1])

    assert changed(start, shorten).reason is UnavailableReason.TRUNCATED


def test_a_part_that_is_too_long_is_unreadable(start):
    def lengthen(client, place):
        name = part_names(client, place)[-1]
        client.hset(place, name, client.hget(place, name) + b"more")

    assert changed(start, lengthen).reason is UnavailableReason.UNREADABLE


@pytest.mark.parametrize(
    "head", [b"", b"\xff", b"[]", b"{}", b"null", b"[" * 100_000, {"parts": 0}, {"nbytes": "3"}, {"write": 7}, {"a": 1}]
)
def test_a_head_that_makes_no_sense_is_unreadable(start, head):
    def change(client, place):
        text = head
        if isinstance(head, dict):
            text = json.dumps(json.loads(client.hget(place, "head")) | head)
        client.hset(place, "head", text)

    error = changed(start, change)
    assert (error.reason, error.damaged) == (UnavailableReason.UNREADABLE, True)


@pytest.mark.parametrize("lie", [{"parts": 10**15}, {"write": "someone-else"}])
def test_a_head_that_lies_is_no_more_than_a_truncated_chunk(start, lie):
    def change(client, place):
        client.hset(place, "head", json.dumps(json.loads(client.hget(place, "head")) | lie))

    assert changed(start, change).reason is UnavailableReason.TRUNCATED


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (sample(2), UnavailableReason.TOKENS_DIFFER),
        (ChunkKV(identity_of(1), sample(1).kv, ShardLayout(1, 2)), UnavailableReason.TP_LAYOUT),
        (ChunkKV(identity_of(1, model="another"), sample(1).kv), UnavailableReason.OTHER_MODEL),
    ],
    ids=lambda value: str(value) if isinstance(value, UnavailableReason) else "",
)
def test_another_chunk_at_the_place_is_not_served(start, other, reason):
    server = start()
    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    tier.put(other)
    with server.client() as client:
        client.rename(key_of(other.identity, other.shard), key_of(identity_of(1)))
    assert reason_of(tier.read, identity_of(1), ONE_RANK) is reason
