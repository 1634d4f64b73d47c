"""A thread that keeps something going while there is something to do, and sleeps otherwise. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class AdvancingThread:
    """Calls `advance` again and again for as long as `has_work` says so; without work it is never woken.

    An exception out of `advance` is logged and ends the thread.

    Args:
        name: of the thread.
        changed: both are called under its lock; who makes work notifies it.
        has_work: whether there is something to advance.
        advance: takes it as far as it gets without waiting.
        period_s: seconds between two calls.
        enter: called in the thread before anything else.
    """

    def __init__(
        self,
        name: str,
        changed: threading.Condition,
        has_work: Callable[[], bool],
        advance: Callable[[], None],
        period_s: float,
        enter: Callable[[], None],
    ):
        self._changed = changed
        self._has_work = has_work
        self._advance = advance
        self._period_s = period_s
        self._enter = enter
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop calling and wait for a call under way; call it without the lock. Ending again does nothing."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._enter()
            while self._wait_for_work():
                with self._changed:
                    self._advance()
                    self._changed.wait_for(lambda: self._ended, self._period_s)
        except Exception:
            logger.exception("the thread %s ends; what it did is done when its owner is called", self._thread.name)

    def _wait_for_work(self) -> bool:
        """Whether there is work, once there is; False when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._has_work())
            return not self._ended
