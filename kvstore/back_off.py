"""When to ask again a server that did not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class BackOff:
    """Turns callers away for a while after a failure: 1 s, then twice as long each time, at most 30 s.

    When a pause is over, one caller tries, and the others are turned away until that one has had an answer. So
    a server that stays silent costs one caller's patience a pause, however many there are. Thread-safe.

    Args:
        patience_s: how long one try may take before another caller may try as well.
        clock: seconds, never going back.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic):
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._closed_until = 0.0
        self._trying = False

    def may_try(self) -> bool:
        """Whether to ask now; who is told yes says afterwards how it went."""
        with self._lock:
            now = self._clock()
            if now < self._closed_until:
                return False
            if self._pause_s:
                self._trying = True
                self._closed_until = now + self._patience_s
            return True

    def failed(self) -> float | None:
        """There was no answer: the seconds of the pause that begins, None if one has begun already."""
        with self._lock:
            if self._pause_s and not self._trying:
                return None
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
            self._closed_until = self._clock() + self._pause_s
            self._trying = False
            return self._pause_s

    def answered(self) -> bool:
        """There was an answer: whether it is the first after a failure."""
        with self._lock:
            first = self._pause_s > 0
            self._pause_s = self._closed_until = 0.0
            self._trying = False
            return first
