from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore import ChunkKey, SingleFlight, StoreError

A, B, C = map(ChunkKey, "abc")


class Work:
    """Keys to be computed, how often each was, and askers that follow the documented loop."""

    def __init__(self) -> None:
        self.computed: list[ChunkKey] = []
        self.done: set[ChunkKey] = set()
        self.flight = SingleFlight(self.done.__contains__)

    def compute(self, keys) -> None:
        self.computed.extend(keys)
        self.done.update(keys)

    def ask(self, keys, compute=None) -> None:
        compute = compute or self.compute
        with self.flight.claim(keys) as claim:
            compute(claim.mine)
            while taken_over := claim.wait():
                compute(taken_over)


def test_many_askers_of_one_missing_chunk_cause_one_computation():
    work, start = Work(), threading.Barrier(16)

    def ask() -> None:
        start.wait()
        work.ask([A, B])

    with ThreadPoolExecutor(16) as pool:
        for asker in [pool.submit(ask) for _ in range(16)]:
            asker.result(timeout=30)
    assert sorted(work.computed) == [A, B]


def test_an_asker_that_comes_after_the_computation_computes_nothing():
    work = Work()
    work.ask([A])
    with work.flight.claim([A]) as claim:
        assert claim.mine == ()
        assert claim.wait() == ()


def test_keys_that_others_compute_are_not_mine_until_they_fail():
    work = Work()
    with work.flight.claim([A, B]) as first:
        assert first.mine == (A, B)
        with work.flight.claim([C, B, C]) as second:
            assert second.mine == (C,)


def test_a_failing_asker_hands_its_keys_to_one_that_waits():
    work, entered, claimed = Work(), threading.Event(), threading.Event()

    def fail(keys) -> None:
        entered.set()
        assert claimed.wait(30)
        raise RuntimeError("the model broke")

    def take_over() -> None:
        with work.flight.claim([A]) as claim:
            assert claim.mine == ()
            claimed.set()
            taken_over = claim.wait()
            assert taken_over == (A,)
            work.compute(taken_over)
            assert claim.wait() == ()

    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(work.ask, [A], fail)
        assert entered.wait(30)
        pool.submit(take_over).result(timeout=30)
        with pytest.raises(RuntimeError, match="the model broke"):
            failing.result(timeout=30)
    assert work.computed == [A]


def test_what_a_failing_asker_had_finished_is_not_computed_again():
    work = Work()

    def finish_one_and_fail(keys) -> None:
        work.compute(keys[:1])
        raise RuntimeError

    with pytest.raises(RuntimeError):
        work.ask([A, B], finish_one_and_fail)
    work.ask([A, B])
    assert work.computed == [A, B]


def test_askers_of_each_others_chunks_do_not_block_for_ever():
    work, start = Work(), threading.Barrier(2)

    def ask(keys) -> None:
        start.wait()
        work.ask(keys)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            work.done.clear()
            for asker in [pool.submit(ask, keys) for keys in ([A, B], [B, A])]:
                asker.result(timeout=30)
    assert len(work.computed) == 100


def test_waiting_after_the_end_is_an_error():
    with Work().flight.claim([A]) as claim:
        pass
    with pytest.raises(StoreError):
        claim.wait()
