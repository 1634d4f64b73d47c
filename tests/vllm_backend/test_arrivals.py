"""Loads of several ranks become one arrival each."""

from __future__ import annotations

from collections import Counter

from connector_samples import identity_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.vllm_backend.arrivals import Arrivals
from kvstore.errors import UnavailableReason
from kvstore.tiers import Tier
from kvstore.transfer import TransferOrder, TransferResult

OUTCOMES = [(None, 100, Tier.DISK), (None, 0, Tier.HOST), (UnavailableReason.CHECKSUM, 0, None)]
FAILED = UnavailableReason.CHECKSUM


def result(chunk, reason=None, nbytes=100, tier=Tier.DISK):
    return TransferResult(chunk.key, reason is None, reason, nbytes, 0.5, tier)


def expecting(ranks, *chunks):
    arrivals = Arrivals(ranks)
    arrivals.expect([TransferOrder(chunk, Tier.HOST) for chunk in chunks])
    return arrivals


def test_a_chunk_arrives_when_the_last_rank_has_told():
    chunk = identity_of(1)
    arrivals = expecting(2, chunk)
    assert arrivals.take([(0, result(chunk))]) == []
    assert arrivals.awaited([chunk.key, identity_of(2).key]) == {chunk.key}
    (arrival,) = arrivals.take([(1, result(chunk))])
    assert (arrival.chunk, arrival.failed, arrival.bytes_from) == (chunk, None, {"disk": 200})
    assert arrivals.awaited([chunk.key]) == set()


def test_one_rank_that_fails_makes_the_load_fail_and_the_bytes_of_the_others_count():
    chunk = identity_of(1)
    failure = result(chunk, FAILED, 0, None)
    (arrival,) = expecting(3, chunk).take([(0, result(chunk)), (2, failure), (1, result(chunk, nbytes=50))])
    assert arrival.failed == failure
    assert arrival.bytes_from == {"disk": 150}


def test_what_was_on_the_host_already_moves_no_bytes():
    chunk = identity_of(1)
    (arrival,) = expecting(1, chunk).take([(0, result(chunk, nbytes=0, tier=Tier.HOST))])
    assert arrival.failed is None
    assert arrival.bytes_from == {}


def test_loads_that_nobody_expects_are_passed_over():
    chunk, other = identity_of(1), identity_of(2)
    arrivals = expecting(1, chunk)
    assert [arrival.chunk for arrival in arrivals.take([(0, result(other)), (0, result(chunk))])] == [chunk]
    assert arrivals.take([(0, result(chunk))]) == []


def test_a_chunk_on_its_way_to_two_tiers_arrives_in_each_and_only_the_hosts_is_awaited():
    chunk = identity_of(1)
    arrivals = Arrivals(1)
    arrivals.expect([TransferOrder(chunk, Tier.GPU)])
    assert arrivals.awaited([chunk.key]) == set()
    arrivals.expect([TransferOrder(chunk, Tier.HOST)])
    (arrival,) = arrivals.take([(0, TransferResult(chunk.key, True, None, 7, 0.1, Tier.HOST, Tier.GPU))])
    assert (arrival.target, arrivals.awaited([chunk.key])) == (Tier.GPU, {chunk.key})
    (arrival,) = arrivals.take([(0, result(chunk))])
    assert (arrival.target, len(arrivals)) == (Tier.HOST, 0)


def test_expecting_a_chunk_again_forgets_nothing_that_was_told():
    chunk = identity_of(1)
    arrivals = expecting(2, chunk)
    arrivals.take([(0, result(chunk))])
    arrivals.expect([TransferOrder(chunk, Tier.HOST)])
    assert len(arrivals.take([(1, result(chunk))])) == 1


def test_a_chunk_can_be_loaded_again_after_it_arrived():
    chunk = identity_of(1)
    arrivals = expecting(1, chunk)
    for _ in range(2):
        assert len(arrivals.take([(0, result(chunk))])) == 1
        arrivals.expect([TransferOrder(chunk, Tier.HOST)])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_every_load_arrives_exactly_once_with_its_last_result_in_any_order(ranks, chunks, data):
    identities = [identity_of(seed) for seed in range(chunks)]
    arrivals = expecting(ranks, *identities)
    pending = data.draw(st.permutations([(rank, chunk) for rank in range(ranks) for chunk in identities]))
    told: Counter[str] = Counter()
    bytes_told: Counter[str] = Counter()
    failures: dict[str, TransferResult] = {}
    arrived = []
    while pending:
        cut = data.draw(st.integers(1, len(pending)))
        report = [(rank, result(chunk, *data.draw(st.sampled_from(OUTCOMES)))) for rank, chunk in pending[:cut]]
        pending = pending[cut:]
        for _, one in report:
            told[one.key] += 1
            bytes_told[one.key] += one.nbytes
            if not one.ok:
                failures.setdefault(one.key, one)
        new = arrivals.take(report)
        assert {arrival.chunk.key for arrival in new} == {key for _, key in _keys(report) if told[key] == ranks}
        arrived += new
    assert Counter(arrival.chunk for arrival in arrived) == Counter(identities)
    assert len(arrivals) == 0
    for arrival in arrived:
        assert arrival.failed == failures.get(arrival.chunk.key)
        assert sum(arrival.bytes_from.values()) == bytes_told[arrival.chunk.key]


def _keys(report):
    return [(rank, one.key) for rank, one in report]
