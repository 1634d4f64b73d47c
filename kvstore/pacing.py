"""How fast copies that nobody waits for may follow one another. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

LEARNT_FROM = 32 << 20
"""Bytes of neighbouring copies that a rate is worked out from: of fewer, what an event is off by makes a fast link."""


class Pace:
    """Spreads copies so that, over time, they take at most a share of what the link could carry.

    Nothing is held back before the first copies have told how fast the link is. A rate that turns out to be higher
    holds for what was asked for before as well: a link that was busy with others at first is not waited for afterwards.

    Args:
        share: of the fastest rate seen, above 0 and up to 1.
        clock: seconds, never going back.
        learnt_from: bytes of copies that a rate is worked out from.
    """

    def __init__(
        self, share: float, clock: Callable[[], float] = time.monotonic, learnt_from: int = LEARNT_FROM
    ) -> None:
        self._share = share
        self._clock = clock
        self._learnt_from = learnt_from
        self._bytes_s = 0.0
        self._sample_bytes = 0
        self._sample_s = 0.0
        # What was asked for and is not due yet at the share's rate.
        self._early_bytes = 0.0
        self._since = 0.0

    def learn(self, nbytes: int, seconds: float) -> None:
        """A copy took so long, from the end of the one before it or from when it was asked for."""
        self._sample_bytes += nbytes
        self._sample_s += seconds
        if self._sample_bytes >= self._learnt_from and self._sample_s > 0:
            self._settle()
            self._bytes_s = max(self._bytes_s, self._sample_bytes / self._sample_s)
            self._sample_bytes, self._sample_s = 0, 0.0

    def note(self, nbytes: int) -> None:
        """So many bytes are asked for now."""
        if self._bytes_s:
            self._settle()
            self._early_bytes += nbytes

    def holds_back(self, bytes_ahead: int) -> bool:
        """Whether as much is asked for as the share allows until `bytes_ahead` more could have been carried."""
        self._settle()
        return self._early_bytes > bytes_ahead * self._share

    def _settle(self) -> None:
        """Take off what has become due."""
        now = self._clock()
        due = (now - self._since) * self._bytes_s * self._share
        self._early_bytes, self._since = max(0.0, self._early_bytes - due), now
