"""A server that is not there, goes, or does not answer is told with a reason, and costs a bounded time once."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest
from kvstore_samples import FINGERPRINT, ONE_RANK, identity_of, same, sample
from redis_server import RedisServer, Relay, free_port, servers
from remote_samples import LARGE, PLENTY_S, failure, large, reason_of

from kvstore import ChunkUnavailable, UnavailableReason, back_off, redis_link, remote
from kvstore.remote import RemoteTier


@pytest.fixture
def start(tmp_path):
    with servers(tmp_path) as start:
        yield start


@pytest.fixture
def no_return(monkeypatch):
    """Once failed, a server is left alone for the rest of the test."""
    monkeypatch.setattr(back_off, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(back_off, "LONGEST_PAUSE_S", 3600.0)


@pytest.fixture
def quick_return(monkeypatch):
    monkeypatch.setattr(back_off, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(back_off, "LONGEST_PAUSE_S", 0.05)


def reached(call, *arguments):
    """What the call gives once the server is asked again."""
    give_up = time.monotonic() + PLENTY_S
    while True:
        try:
            return call(*arguments)
        except ChunkUnavailable as error:
            if error.reason is not UnavailableReason.UNREACHABLE or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def test_a_server_that_is_not_there_is_unreachable_and_is_used_once_it_is(tmp_path, quick_return):
    server = RedisServer(tmp_path)
    server.port = free_port()
    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    for call in (tier.read, tier.holds):
        assert reason_of(call, identity_of(1), ONE_RANK) is UnavailableReason.UNREACHABLE
    assert reason_of(tier.put, sample(1)) is UnavailableReason.UNREACHABLE
    assert tier.delete(identity_of(1).key, FINGERPRINT, [ONE_RANK]) == 0
    server.start()
    try:
        reached(tier.put, sample(1))
        assert same(tier.read(identity_of(1), ONE_RANK), sample(1))
    finally:
        server.kill()


def test_a_server_that_was_restarted_between_two_reads_is_read_without_a_failure(start):
    server = start(appendonly="yes", appendfsync="always")
    tier = RemoteTier(server.url, timeout_s=PLENTY_S)
    tier.put(sample(1))
    server.kill()
    server.start()
    assert same(tier.read(identity_of(1), ONE_RANK), sample(1))


def test_a_server_killed_in_the_middle_of_a_read_is_unreachable_and_read_when_it_is_back(start, quick_return):
    server = start(appendonly="yes", appendfsync="always")
    RemoteTier(server.url, timeout_s=PLENTY_S).put(large(1))
    relay = Relay(server.port, server.kill, to_client=LARGE // 2)
    tier = RemoteTier(relay.url, timeout_s=PLENTY_S)
    assert reason_of(tier.read, identity_of(1), ONE_RANK) is UnavailableReason.UNREACHABLE
    assert relay.tripped
    server.start()
    assert same(reached(tier.read, identity_of(1), ONE_RANK), large(1))
    relay.close()


def test_a_server_killed_in_the_middle_of_a_write_comes_back_with_nothing_half(start, quick_return):
    server = start(appendonly="yes", appendfsync="always")
    relay = Relay(server.port, server.kill, to_server=LARGE * 3 // 4)
    tier = RemoteTier(relay.url, timeout_s=PLENTY_S)
    assert reason_of(tier.put, large(1)) is UnavailableReason.UNREACHABLE
    assert relay.tripped
    server.start()
    assert reached(tier.holds, identity_of(1), ONE_RANK) is None
    assert reason_of(tier.read, identity_of(1), ONE_RANK) is UnavailableReason.MISSING
    tier.put(large(1))
    assert same(tier.read(identity_of(1), ONE_RANK), large(1))
    relay.close()


def test_a_writer_cut_off_leaves_the_chunk_that_was_there_and_a_draft_that_expires(start):
    server = start()
    direct = RemoteTier(server.url, timeout_s=PLENTY_S)
    direct.put(large(1, value=1))
    relay = Relay(server.port, lambda: None, to_server=LARGE * 3 // 4)
    assert reason_of(RemoteTier(relay.url).put, large(1, value=2)) is UnavailableReason.UNREACHABLE
    assert same(direct.read(identity_of(1), ONE_RANK), large(1, value=1))
    (draft,) = server.drafts()
    with server.client() as client:
        assert 0 < client.ttl(draft) <= remote.DRAFT_LIFE_S
    relay.close()


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("what", ["put", "read", "holds"])
def test_a_stopped_server_is_given_up_and_then_left_alone(start, no_return, what, connected):
    server = start()
    tier = RemoteTier(server.url, timeout_s=0.3)
    if connected:
        assert tier.holds(identity_of(1), ONE_RANK) is None
    arguments = (large(1),) if what == "put" else (identity_of(1), ONE_RANK)
    server.pause()
    first = failure(getattr(tier, what), *arguments)
    assert first.reason is UnavailableReason.UNREACHABLE
    assert "cannot be reached" in str(first)
    server.resume()
    # It would answer now; that it is not asked shows that these calls cost no time.
    for call in (tier.read, tier.holds):
        second = failure(call, identity_of(1), ONE_RANK)
        assert second.reason is UnavailableReason.UNREACHABLE
        assert "is left alone" in str(second)
    assert "is left alone" in str(failure(tier.put, sample(1)))


def test_a_stopped_server_is_used_again_when_it_goes_on(start, quick_return):
    server = start()
    tier = RemoteTier(server.url, timeout_s=0.3)
    reached(tier.put, sample(1))
    server.pause()
    assert reason_of(tier.read, identity_of(1), ONE_RANK) is UnavailableReason.UNREACHABLE
    server.resume()
    assert same(reached(tier.read, identity_of(1), ONE_RANK), sample(1))


def test_a_server_that_never_is_silent_but_too_slow_is_given_up_as_well(start, no_return, monkeypatch):
    """Twenty thousand round trips, in the time allowed for a few."""
    server = start()
    monkeypatch.setattr(remote, "PART_BYTES", 64)
    monkeypatch.setattr(remote, "PARTS_A_TRIP", 30_000)
    RemoteTier(server.url, timeout_s=PLENTY_S).put(large(1, nbytes=20_000 * 64))
    monkeypatch.setattr(remote, "PARTS_A_TRIP", 1)
    monkeypatch.setattr(redis_link, "SLOWEST_BYTES_PER_S", 1 << 40)
    tier = RemoteTier(server.url, timeout_s=0.3)
    error = failure(tier.read, identity_of(1), ONE_RANK)
    assert error.reason is UnavailableReason.UNREACHABLE
    assert reason_of(tier.holds, identity_of(1), ONE_RANK) is UnavailableReason.UNREACHABLE


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":what\r\n", b"$x\r\n", b""])
def test_a_server_of_another_kind_is_unreachable(says):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(1 << 16)
                client.sendall(says)

    threading.Thread(target=answer, daemon=True).start()
    tier = RemoteTier(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=PLENTY_S)
    assert reason_of(tier.read, identity_of(1), ONE_RANK) is UnavailableReason.UNREACHABLE
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_lost_server_is_logged_once_and_so_is_its_return_and_never_a_password(tmp_path, quick_return, caplog):
    caplog.set_level(logging.DEBUG)
    server = RedisServer(tmp_path, requirepass="hidden")
    server.port = free_port()
    tier = RemoteTier(server.url.replace("//", "//default:hidden@"), timeout_s=PLENTY_S)
    errors = [failure(tier.read, identity_of(1), ONE_RANK)]
    server.start()
    try:
        assert reached(tier.holds, identity_of(1), ONE_RANK) is None
    finally:
        server.kill()
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("kvstore")]
    assert [f"127.0.0.1:{server.port}/0" in text for text in texts] == [True] * len(texts)
    assert "it is left alone for" in texts[0]
    assert texts[-1].endswith("answers again")
    assert "hidden" not in caplog.text + "".join(str(error) + repr(error) for error in errors)
