"""Copies that nobody waits for take their share of the link, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.pacing import Pace

RATE = 1000.0
"""Bytes a second that the link carries."""


class Link:
    """Carries one copy after another; the clock stands still but for `wait`."""

    def __init__(self, share: float, ahead: int) -> None:
        self.now = 0.0
        self.pace = Pace(share, lambda: self.now, learnt_from=1)
        self.ahead = ahead
        self.free_at = self.busy_s = 0.0
        self.asked: list[tuple[float, int]] = []

    def ask(self, nbytes: int) -> bool:
        if self.pace.holds_back(self.ahead):
            return False
        self.pace.note(nbytes)
        began = max(self.now, self.free_at)
        self.free_at = began + nbytes / RATE
        self.busy_s += nbytes / RATE
        # A gap before a copy makes the link look slower than it is, never faster.
        self.pace.learn(nbytes, self.free_at - min(began, self.now))
        self.asked.append((self.now, nbytes))
        return True


def test_nothing_is_held_back_before_the_rate_is_known():
    pace = Pace(0.5, lambda: 0.0)
    pace.learn(1, 1.0)
    for _ in range(100):
        pace.note(1 << 30)
        assert not pace.holds_back(1)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([0.25, 0.5, 0.82, 1.0]),
    st.lists(st.tuples(st.integers(1, 400), st.floats(0.0, 0.5)), min_size=1, max_size=200),
)
def test_over_any_time_copies_take_their_share_and_what_may_be_ahead(share, turns):
    link = Link(share, ahead=500)
    link.pace.learn(1000, 1.0)
    for nbytes, waits in turns:
        while link.ask(nbytes):
            pass
        link.now += waits
    for first, (since, _) in enumerate(link.asked):
        total = 0
        for at, nbytes in link.asked[first:]:
            # What was held back until now comes at once, with one copy more than there was room for.
            assert total <= (at - since) * RATE * share + 500 * share + 1e-6
            total += nbytes


@pytest.mark.parametrize("share", [0.25, 0.82])
def test_who_always_has_more_to_copy_gets_the_whole_share(share):
    link = Link(share, ahead=250)
    for _ in range(4000):
        while link.ask(80):
            pass
        link.now += 0.01
    assert link.busy_s / link.now == pytest.approx(share, rel=0.02)


def test_time_without_copies_is_not_made_up_for():
    link = Link(0.5, ahead=100)
    link.pace.learn(1000, 1.0)
    link.now = 60.0
    at_once = sum(link.ask(50) for _ in range(100))
    assert at_once <= 2


@pytest.mark.parametrize("seconds_of_the_first", [1.0, 60.0, 3600.0])
def test_a_link_that_was_slow_at_first_is_not_waited_for_afterwards(seconds_of_the_first):
    link = Link(0.5, ahead=500)
    link.pace.learn(50, seconds_of_the_first)
    while link.pace.holds_back(500) or not link.ask(50):
        link.now += 0.01
    # As others have left it, the rest goes at the share of its real rate.
    began, asked = link.now, len(link.asked)
    while link.now < began + 10:
        while link.ask(50):
            pass
        link.now += 0.01
    carried = sum(nbytes for _, nbytes in link.asked[asked:])
    assert carried == pytest.approx(10 * RATE * 0.5, rel=0.1)


def test_a_rate_is_worked_out_from_enough_bytes_for_one_short_interval_not_to_count():
    now = [0.0]
    pace = Pace(1.0, lambda: now[0], learnt_from=1000)
    for seconds in (1.0, 0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9):
        pace.learn(100, seconds)
    pace.note(1000)
    assert pace.holds_back(100)
    now[0] += 1000 / (1000 / 9)
    assert not pace.holds_back(0)
