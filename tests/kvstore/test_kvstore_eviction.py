from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

import kvstore.eviction
from kvstore import ChunkKey, GdsfPolicy, LruPolicy, S3FifoPolicy, StoreError, make_policy
from kvstore.eviction import POLICIES

A, B, C, D = map(ChunkKey, "abcd")
ROOM = str(Path(kvstore.eviction.__file__).parent)


def filled(policy, *entries: tuple[ChunkKey, int]):
    for key, nbytes in entries:
        policy.add(key, nbytes, 0.001)
    return policy


def evict(policy, nbytes: int) -> list[ChunkKey]:
    victims = policy.victims(nbytes)
    for key in victims:
        policy.remove(key)
    return victims


def lines_run(call) -> int:
    """Lines of the policies' code that a call runs: its work, without a clock."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    def enter(frame, event, argument):
        return count if frame.f_code.co_filename.startswith(ROOM) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize(("name", "made"), [("lru", LruPolicy), ("gdsf", GdsfPolicy), ("s3fifo", S3FifoPolicy)])
def test_a_policy_is_made_by_its_name(name, made):
    assert type(make_policy(name)) is made


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(StoreError, match="'belady'; choose one of gdsf, lru, s3fifo"):
        make_policy("belady")


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_no_size_cost_or_probability_is_refused(name):
    policy = make_policy(name)
    for nbytes, cost_s in ((0, 0.0), (-1, 0.0), (1, -0.1), (1, float("nan")), (1, float("inf"))):
        with pytest.raises(StoreError, match="is entered with"):
            policy.add(A, nbytes, cost_s)
    for confidence in (-0.1, 1.1, float("nan")):
        with pytest.raises(StoreError, match="give a number from 0 to 1"):
            policy.expect(A, confidence)
    assert policy.victims(1) == []


@pytest.mark.parametrize("name", POLICIES)
def test_a_hold_released_twice_is_refused_and_takes_nobody_elses(name):
    policy = filled(make_policy(name), (A, 10))
    policy.hold(A)
    policy.release(A)
    with pytest.raises(StoreError, match="released but not held"):
        policy.release(A)
    assert policy.victims(10) == [A]


@pytest.mark.parametrize("name", POLICIES)
def test_a_chunk_is_no_victim_until_its_last_hold_is_released(name):
    policy = make_policy(name)
    policy.hold(A)
    filled(policy, (C, 10), (A, 10), (B, 10))
    policy.hold(A)
    policy.hold(C)
    assert policy.victims(10) == [B]
    assert policy.victims(11) == []
    policy.release(A)
    assert policy.victims(11) == []
    policy.release(A)
    assert sorted(policy.victims(11)) == [A, B]


@pytest.mark.parametrize("name", POLICIES)
def test_a_hold_outlives_the_chunks_leaving_the_tier(name):
    policy = filled(make_policy(name), (A, 10))
    policy.hold(A)
    policy.remove(A)
    policy.add(A, 10, 0.001)
    assert policy.victims(10) == []


@pytest.mark.parametrize("name", POLICIES)
def test_the_order_survives_thousands_of_uses_between_two_evictions(name):
    """Outdated entries of the heaps are thrown away meanwhile."""
    policy = filled(make_policy(name), *((ChunkKey(f"{number:02d}"), 10) for number in range(10)))
    for _ in range(1_000):
        for number in range(10):
            policy.hold(ChunkKey(f"{number:02d}"))
            policy.touch(ChunkKey(f"{number:02d}"))
            policy.release(ChunkKey(f"{number:02d}"))
    assert policy.victims(100) == [ChunkKey(f"{number:02d}") for number in range(10)]


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_eviction_after_many_uses_does_not_pay_for_them_all(name):
    def work(uses: int) -> int:
        policy = filled(make_policy(name), *((ChunkKey(f"{number:02d}"), 10) for number in range(10)))
        for _ in range(uses):
            for number in range(10):
                policy.touch(ChunkKey(f"{number:02d}"))
                policy.hold(ChunkKey(f"{number:02d}"))
                policy.release(ChunkKey(f"{number:02d}"))
        return lines_run(lambda: policy.victims(10))

    assert work(1_000) < work(10) + 1_000


@pytest.mark.parametrize("name", POLICIES)
def test_thousands_of_held_chunks_cost_victims_nothing(name):
    def work(held: int) -> int:
        policy = make_policy(name)
        for number in range(held):
            policy.add(ChunkKey(f"held-{number}"), 10, 0.001)
        for number in range(20):
            policy.add(ChunkKey(f"free-{number}"), 10, 0.001)
        for number in range(held):
            policy.hold(ChunkKey(f"held-{number}"))
        # What it costs to leave them aside is paid once, by those who held them.
        policy.victims(10)
        return lines_run(lambda: policy.victims(50))

    assert work(5_000) == work(0)


@pytest.mark.parametrize("name", POLICIES)
def test_the_work_of_a_call_does_not_grow_with_the_chunks(name):
    def work(chunks: int) -> float:
        draw = random.Random(0)
        keys = [ChunkKey(str(number)) for number in range(chunks)]
        policy = filled(make_policy(name), *((key, 10) for key in keys))

        def use_and_evict() -> None:
            for _ in range(1_000):
                key = draw.choice(keys)
                policy.hold(key)
                policy.add(key, 10, draw.random())
                policy.release(key)
                policy.expect(draw.choice(keys), draw.random())
                evict(policy, 10)

        return lines_run(use_and_evict)

    assert work(4_000) < 1.5 * work(40)


def test_lru_evicts_what_was_used_longest_ago():
    policy = filled(LruPolicy(), (A, 10), (B, 10), (C, 10))
    assert policy.victims(11) == [A, B]
    policy.touch(A)
    policy.expect(B, 1.0)
    assert policy.victims(11) == [B, C]


def test_gdsf_keeps_what_is_dear_to_have_again_for_its_bytes():
    policy = GdsfPolicy()
    policy.add(A, 10, cost_s=0.5)
    policy.add(B, 10, cost_s=0.1)
    policy.add(C, 100, cost_s=0.5)
    assert policy.victims(111) == [C, B, A]


def test_gdsf_keeps_what_was_used_again_until_newcomers_outweigh_it():
    policy = filled(GdsfPolicy(), (A, 10))
    policy.touch(A)
    gone = []
    for number in range(3):
        policy.add(ChunkKey(f"new-{number}"), 10, 0.001)
        gone += evict(policy, 10)
    assert gone == ["new-0", A, "new-1"]


def test_gdsf_keeps_what_is_expected_until_that_is_taken_back():
    policy = filled(GdsfPolicy(), (A, 10), (B, 10), (C, 10))
    policy.expect(A, 0.9)
    policy.expect(B, 0.1)
    assert policy.victims(30) == [C, B, A]
    policy.expect(A, 0.0)
    policy.expect(B, 0.0)
    assert policy.victims(11) == [C, A]


def test_gdsf_does_not_age_by_chunks_that_are_lost_or_were_used_after_they_were_proposed():
    policy = filled(GdsfPolicy(), (A, 10), (B, 10), (C, 10))
    policy.touch(C)
    assert policy.victims(10) == [A]
    policy.touch(A)
    policy.remove(A)
    # Had the age risen to A's, D would stand above C.
    policy.add(D, 10, 0.001)
    assert policy.victims(30) == [B, D, C]


def test_s3fifo_evicts_newcomers_used_once_before_what_was_used_again():
    policy = filled(S3FifoPolicy(), (A, 10), (B, 10), (C, 10))
    policy.touch(A)
    policy.touch(A)
    assert policy.victims(20) == [B, C]


def test_s3fifo_brings_what_comes_back_to_main_at_once():
    policy = filled(S3FifoPolicy(), (A, 10), (B, 10), (C, 10))
    assert evict(policy, 10) == [A]
    filled(policy, (A, 10))
    assert evict(policy, 20) == [B, C]


def test_s3fifo_does_not_remember_what_was_used_after_it_was_doomed_and_then_lost():
    policy = filled(S3FifoPolicy(), (A, 10), (B, 10), (C, 10))
    assert policy.victims(10) == [A]
    policy.touch(A)
    policy.remove(A)
    filled(policy, (A, 10), (D, 10))
    assert evict(policy, 40) == [B, C, A, D]


def test_s3fifo_spares_a_doomed_chunk_that_is_used_or_expected():
    policy = filled(S3FifoPolicy(), (A, 10), (B, 10), (C, 10))
    assert policy.victims(20) == [A, B]
    policy.touch(A)
    policy.expect(B, 0.5)
    assert policy.victims(30) == [C, A, B]
