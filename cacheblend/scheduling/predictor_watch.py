"""The thread that keeps a predictor's process running and carries its messages. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable

from cacheblend.protocols import PredictorEvent
from cacheblend.scheduling.predictor_frames import AdviceChange, EventBatch, FrameReader, FrameWriter, PredictorSpec

logger = logging.getLogger(__name__)

START_S = 60.0
"""A process that has said nothing for so long after its start is taken for hung."""
LOOK_S = 0.25
"""Time between two looks at the process when there is nothing to send or read."""
PAUSE_S = 0.01
"""Time between two batches of events: what comes meanwhile goes together."""
CLOSE_S = 1.0
"""Time that a process gets to end by itself."""
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 10.0
MINUTE_S = 60.0


class ChildProcess:
    """A running predictor process and its two pipes, of which neither blocks.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, spec: PredictorSpec) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cacheblend.scheduling.predictor_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.source, self.sink = self._process.stdout.fileno(), self._process.stdin.fileno()
        os.set_blocking(self.source, False)
        os.set_blocking(self.sink, False)
        self.reader, self.writer = FrameReader(self.source), FrameWriter(self.sink)
        self.writer.put(spec)
        self.started_at = time.monotonic()
        self.heard_at: float | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def lost(self, silence_s: float) -> str | None:
        """Why nothing more can be expected of it, None if it lives; to be asked after reading what it said."""
        if self.reader.ended or self._process.poll() is not None:
            return "ended"
        since, patience = (self.started_at, START_S) if self.heard_at is None else (self.heard_at, silence_s)
        return "gives no sign of life" if time.monotonic() - since > patience else None

    def end(self, patience_s: float) -> None:
        """Close its input, and kill it if it has not ended after so long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class PredictorWatch:
    """Runs a predictor's process: `run` is a thread's work until `stop`.

    Args:
        spec: the predictor to run.
        take: events to send, oldest first; called when the process can take them.
        catch_up: events that a process in the place of a lost one is told before any other.
        deliver: gets each change of advice.
        silence_s: seconds without a sign of life after which the process is killed.
        restarts_per_minute: how often it is started anew within a minute, at most.

    Attributes:
        restarts: how often the process was started anew.
        pid: of the process, None while there is none.
    """

    def __init__(
        self,
        spec: PredictorSpec,
        take: Callable[[], list[PredictorEvent]],
        catch_up: Callable[[], list[PredictorEvent]],
        deliver: Callable[[AdviceChange], None],
        silence_s: float,
        restarts_per_minute: int,
    ) -> None:
        self._spec, self._take, self._catch_up, self._deliver = spec, take, catch_up, deliver
        self._silence_s = silence_s
        self._recent: deque[float] = deque(maxlen=restarts_per_minute)
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._awake = False
        self._stopped = False
        self._child: ChildProcess | None = None
        self._start_at = 0.0
        self._failures = 0
        self.restarts = 0
        self.pid: int | None = None

    def wake(self) -> None:
        """There are events to take; never blocks."""
        if not self._awake:
            self._awake = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_in, b"w")

    def stop(self) -> None:
        """Let `run` end the process and return."""
        self._stopped = True
        self._awake = False
        self.wake()

    def run(self) -> None:
        """Keep a process running, and messages going, until `stop`."""
        try:
            while not self._stopped:
                try:
                    self._turn()
                except Exception:
                    logger.exception("the exchange with the predictor's process failed")
                    self._lose("was given up")
        finally:
            self.pid = None
            if self._child is not None:
                self._child.end(CLOSE_S)
            os.close(self._wake_out)
            os.close(self._wake_in)

    def _turn(self) -> None:
        if self._child is None and time.monotonic() >= self._start_at:
            self._start()
        self._sleep_until_something()
        if self._child is None:
            return
        for change in self._child.reader.messages():
            self._child.heard_at = time.monotonic()
            self._deliver(change)
        if not self._child.writer.busy and (events := self._take()):
            self._child.writer.put(EventBatch(tuple(events)))
        with contextlib.suppress(BrokenPipeError):
            self._child.writer.flush()
        if reason := self._child.lost(self._silence_s):
            self._lose(reason)

    def _sleep_until_something(self) -> None:
        sources, sinks, wait = [self._wake_out], [], LOOK_S
        if self._child is not None:
            sources.append(self._child.source)
            if self._child.writer.busy:
                sinks.append(self._child.sink)
        else:
            wait = min(LOOK_S, max(0.0, self._start_at - time.monotonic()))
        select.select(sources, sinks, [], wait)
        if not self._stopped:
            time.sleep(PAUSE_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 64)
        # Before events are taken: one that comes afterwards wakes this thread again.
        self._awake = False

    def _start(self) -> None:
        try:
            self._child = ChildProcess(self._spec)
        except OSError as error:
            logger.warning("the predictor's process cannot be started: %s", error)
            self._wait_before_restart()
            return
        self.pid = self._child.pid
        if self._failures:
            self.restarts += 1
            self._child.writer.put(EventBatch(tuple(self._catch_up())))

    def _lose(self, reason: str) -> None:
        child, self._child, self.pid = self._child, None, None
        if child is None:
            return
        child.end(0.0)
        if time.monotonic() - child.started_at > LONGEST_BACKOFF_S:
            self._failures = 0
        self._wait_before_restart()
        logger.warning(
            "the predictor's process %d %s; serving goes on without advice, a new one follows", child.pid, reason
        )

    def _wait_before_restart(self) -> None:
        now = time.monotonic()
        self._start_at = now + min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._failures, 10))
        if len(self._recent) == self._recent.maxlen:
            self._start_at = max(self._start_at, self._recent[0] + MINUTE_S)
        self._recent.append(self._start_at)
        self._failures += 1
