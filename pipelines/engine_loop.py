"""The engine on a thread of its own, so that callers from any thread or event loop are batched together."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from cacheblend.engine import BlendEngine
from cacheblend.request import EngineRequest, EngineStep, RequestOutcome
from pipelines.errors import PipelineError

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnTokens = Callable[[tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class _Pending:
    outcome: Future[RequestOutcome]
    on_tokens: OnTokens | None


@dataclass(frozen=True, slots=True)
class _Message:
    """What to do on the loop's thread, and whom to tell if the loop ends before."""

    run: Callable[[], object]
    refuse: Callable[[BaseException], object]


class EngineLoop:
    """Drives a `BlendEngine` while there is work.

    Args:
        engine: the engine; only the loop's thread touches it from now on.
    """

    def __init__(self, engine: BlendEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._pending: dict[str, _Pending] = {}
        self._open = True
        # Held while posting and while closing: what is in the inbox was posted to an open loop, and is answered.
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="blend-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> Future[RequestOutcome]:
        """Queue a request; its times count from now, so they include the wait for the loop.

        Args:
            request: what to serve.
            on_tokens: called on the loop's thread with each step's new ids.

        Returns:
            Its outcome, or the BlendError it was refused with. It cannot be cancelled; use `abort`.

        Raises:
            PipelineError: if the loop is closed.
        """
        submitted = time.perf_counter()
        pending = _Pending(Future(), on_tokens)
        # An event loop that cancels its own future must not cancel this one, which the loop still resolves.
        pending.outcome.set_running_or_notify_cancel()

        def enter() -> None:
            try:
                self._engine.submit(request, submitted)
            except ValueError as error:
                pending.outcome.set_exception(error)
            else:
                self._pending[request.request_id] = pending

        self._send(_Message(enter, pending.outcome.set_exception))
        return pending.outcome

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the loop's thread between two steps and return what it returns.

        Raises:
            PipelineError: if the loop is closed, also while this waits; or whatever `function` raises.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self._send(_Message(run, result.set_exception))
        return result.result()

    def post(self, message: Callable[[], object]) -> None:
        """Have `message` run on the loop's thread between two steps, unless the loop ends before.

        What it raises ends the loop.

        Raises:
            PipelineError: if the loop is closed.
        """
        self._send(_Message(message, lambda error: None))

    def abort(self, request_id: str) -> None:
        """End a request; its outcome says so. Unknown ones are let be, and so is a closed loop."""
        with contextlib.suppress(PipelineError):
            self.post(lambda: self._engine.abort(request_id))

    def close(self) -> None:
        """End what is running and stop the thread. Closing again does nothing."""
        with self._gate:
            self._open = False
        self._inbox.put(_Message(lambda: None, lambda error: None))
        self._thread.join()

    def _send(self, message: _Message) -> None:
        with self._gate:
            if not self._open:
                raise PipelineError("The pipeline is closed; make a new one.")
            self._inbox.put(message)

    def _serve(self) -> None:
        ended: BaseException = PipelineError("The pipeline was closed before the question was answered.")
        try:
            while self._open:
                self._read_inbox()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
        except BaseException as error:
            logger.exception("the engine failed and is closed")
            ended = error
        self._end(ended)

    def _end(self, error: BaseException) -> None:
        """Nothing may wait for a thread that is gone: whoever waits gets `error`."""
        with self._gate:
            self._open = False
        try:
            self._engine.close()
        except Exception:
            logger.exception("the engine could not be closed")
        for pending in self._pending.values():
            pending.outcome.set_exception(error)
        self._pending.clear()
        while (message := self._next_message()) is not None:
            message.refuse(error)

    def _read_inbox(self) -> None:
        """Handle every message; wait for one if there is nothing else to do."""
        if not self._engine.has_work:
            self._inbox.get().run()
        while self._open and (message := self._next_message()) is not None:
            message.run()

    def _next_message(self) -> _Message | None:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _deliver(self, step: EngineStep) -> None:
        for request_id, tokens in step.tokens.items():
            on_tokens = self._pending[request_id].on_tokens
            if on_tokens is not None:
                on_tokens(tokens)
        for outcome in step.finished:
            pending = self._pending.pop(outcome.request_id)
            if outcome.error is None:
                pending.outcome.set_result(outcome)
            else:
                pending.outcome.set_exception(outcome.error)
