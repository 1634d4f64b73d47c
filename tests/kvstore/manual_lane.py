"""A lane whose work is done when a test says so: what a stream and its events are to a process that never waits."""

from __future__ import annotations

import ctypes
from collections import deque
from itertools import count

import torch

from kvstore.pacing import Pace

LONG_WORK = 1000
"""Of a caller whom the lane follows, in copies."""


class ManualMark:
    """Passed once the lane has worked off everything before it; `at` counts the lane's work until then."""

    def __init__(self) -> None:
        self.at: int | None = None

    def passed(self) -> bool:
        return self.at is not None

    def seconds_since(self, earlier: ManualMark) -> float:
        assert self.at is not None
        assert earlier.at is not None
        return float(self.at - earlier.at)


class Queued:
    """Work on another queue, over when a test says so."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


class ManualLane:
    """Poisons what is to be filled, and fills it later through bare addresses: it keeps no memory alive."""

    def __init__(self) -> None:
        self._asked: deque[ManualMark | tuple[int, int, int] | int] = deque()
        self.bytes_asked = 0
        self.copies_done = 0
        self.followed_after: list[int] = []

    def follow_caller(self) -> None:
        self.followed_after.append(self.bytes_asked)
        self._asked.append(LONG_WORK)

    def enter_thread(self) -> None:
        """The CPU has no current device."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.is_contiguous()
        assert source.is_contiguous()
        assert (destination.shape, destination.dtype) == (source.shape, source.dtype)
        destination.fill_(torch.nan)
        self._asked.append((destination.data_ptr(), source.data_ptr(), source.nbytes))
        self.bytes_asked += source.nbytes

    def mark(self) -> ManualMark:
        mark = ManualMark()
        self._asked.append(mark)
        return mark

    def work(self, copies: int = 1_000_000) -> None:
        """Do the next `copies` copies and pass the marks behind them."""
        while self._asked and (copies or isinstance(self._asked[0], ManualMark)):
            asked = self._asked.popleft()
            if isinstance(asked, ManualMark):
                asked.at = self.copies_done
            elif isinstance(asked, int):
                self.copies_done += asked
            else:
                ctypes.memmove(*asked)
                self.copies_done += 1
                copies -= 1


def unhurried() -> Pace:
    """A pace that never holds a copy back: from one look at the clock to the next a long time goes by."""
    return Pace(1.0, count(step=1_000_000).__next__)
