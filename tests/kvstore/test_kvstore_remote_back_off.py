from __future__ import annotations

import itertools

from kvstore.back_off import BackOff


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def failed_once(patience_s: float = 2.0) -> tuple[BackOff, Clock]:
    clock = Clock()
    back_off = BackOff(patience_s, clock)
    assert back_off.may_try()
    assert back_off.failed() == 1
    return back_off, clock


def test_everyone_may_try_a_server_that_never_failed():
    back_off = BackOff(2, Clock())
    assert all(back_off.may_try() for _ in range(5))
    assert not back_off.answered()


def test_nobody_tries_during_a_pause():
    back_off, clock = failed_once()
    clock.now += 0.99
    assert not back_off.may_try()


def test_one_tries_after_the_pause_and_the_others_wait_for_the_answer():
    back_off, clock = failed_once()
    clock.now += 1
    assert [back_off.may_try() for _ in range(3)] == [True, False, False]
    assert back_off.answered()
    assert [back_off.may_try() for _ in range(3)] == [True, True, True]
    assert not back_off.answered()


def test_another_tries_when_the_one_that_tried_never_said_how_it_went():
    back_off, clock = failed_once(patience_s=2)
    clock.now += 1
    assert back_off.may_try()
    clock.now += 2
    assert [back_off.may_try() for _ in range(2)] == [True, False]


def test_pauses_double_up_to_half_a_minute():
    back_off, clock = failed_once()
    pauses = []
    for pause in itertools.accumulate([1] * 7, lambda pause, _: min(2 * pause, 30)):
        clock.now += pause
        assert back_off.may_try()
        pauses.append(back_off.failed())
        assert not back_off.may_try()
    assert pauses == [2, 4, 8, 16, 30, 30, 30]


def test_calls_that_fail_together_begin_one_pause():
    back_off, clock = failed_once()
    assert [back_off.failed() for _ in range(3)] == [None, None, None]
    clock.now += 1
    assert back_off.may_try()
    assert back_off.failed() == 2


def test_after_an_answer_the_first_pause_is_short_again():
    back_off, clock = failed_once()
    clock.now += 1
    assert back_off.may_try()
    assert back_off.failed() == 2
    clock.now += 2
    assert back_off.may_try()
    assert back_off.answered()
    assert back_off.failed() == 1
