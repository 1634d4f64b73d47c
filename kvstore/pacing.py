"""How fast copies that nobody waits for may follow one another. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Spreads copies so that, over time, they take at most a share of what the link could carry.

    Nothing is held back before the first copy has told how fast the link is.

    Args:
        share: of the fastest rate seen, above 0 and up to 1.
        clock: seconds, never going back.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._bytes_s = 0.0
        self._due = 0.0

    def learn(self, nbytes: int, seconds: float) -> None:
        """A copy took so long, from the end of the one before it or from when it was asked for."""
        if seconds > 0:
            self._bytes_s = max(self._bytes_s, nbytes / seconds)

    def note(self, nbytes: int) -> None:
        """So many bytes are asked for now."""
        if self._bytes_s:
            self._due = max(self._due, self._clock()) + nbytes / (self._bytes_s * self._share)

    def holds_back(self, bytes_ahead: int) -> bool:
        """Whether as much is asked for as the share allows until `bytes_ahead` more could have been carried."""
        return self._bytes_s > 0 and (self._due - self._clock()) * self._bytes_s > bytes_ahead
