"""A thread that keeps something going while there is something to do, and sleeps otherwise. Imports no torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class AdvancingThread:
    """Calls `advance` again and again for as long as `has_work` says so; without work it is never woken.

    An exception out of `advance` is logged and ends the thread.

    Args:
        name: of the thread.
        changed: both are called under its lock; who makes work calls `wake`.
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
        self._asleep = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be work now; call it under the lock. A thread that has work looks soon enough by itself."""
        if self._asleep:
            self._changed.notify_all()

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
                # Not on the condition: that costs the interpreter more, and the end can wait for so long.
                time.sleep(self._period_s)
        except Exception:
            logger.exception("the thread %s ends; what it did is done when its owner is called", self._thread.name)

    def _wait_for_work(self) -> bool:
        """Whether there is work, once there is; False when it is over."""
        with self._changed:
            self._asleep = True
            self._changed.wait_for(lambda: self._ended or self._has_work())
            self._asleep = False
            return not self._ended
