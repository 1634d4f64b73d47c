"""The engine on a thread of its own, so that callers from any thread or event loop are batched together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from cacheblend.engine import BlendEngine
from cacheblend.request import EngineRequest, EngineStep, RequestOutcome
from pipelines.errors import PipelineError

T = TypeVar("T")
OnTokens = Callable[[tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class _Pending:
    outcome: Future[RequestOutcome]
    on_tokens: OnTokens | None


class EngineLoop:
    """Drives a `BlendEngine` while there is work.

    Args:
        engine: the engine; only the loop's thread touches it from now on.
    """

    def __init__(self, engine: BlendEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._pending: dict[str, _Pending] = {}
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="blend-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> Future[RequestOutcome]:
        """Queue a request.

        Args:
            request: what to serve.
            on_tokens: called on the loop's thread with each step's new ids.

        Returns:
            Its outcome, or the BlendError it was refused with.
        """
        pending = _Pending(Future(), on_tokens)

        def enter() -> None:
            self._pending[request.request_id] = pending
            try:
                self._engine.submit(request)
            except ValueError as error:
                del self._pending[request.request_id]
                pending.outcome.set_exception(error)

        self.post(enter)
        return pending.outcome

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the loop's thread between two steps and return what it returns."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self.post(run)
        return result.result()

    def post(self, message: Callable[[], object]) -> None:
        """Have `message` run on the loop's thread between two steps; what it raises ends the loop.

        Raises:
            PipelineError: if the loop is closed.
        """
        if not self._open:
            raise PipelineError("The pipeline is closed; make a new one.")
        self._inbox.put(message)

    def abort(self, request_id: str) -> None:
        """End a request; its outcome says so. Unknown ones are let be."""
        self.post(lambda: self._engine.abort(request_id))

    def close(self) -> None:
        """End what is running and stop the thread. Closing again does nothing."""
        if self._open:
            self._open = False
            self._inbox.put(lambda: None)
            self._thread.join()

    def _serve(self) -> None:
        try:
            while self._open:
                self._read_inbox()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
            self._engine.close()
            self._fail_pending(PipelineError("The pipeline was closed before the question was answered."))
        except BaseException as error:
            # Nothing may wait for a thread that is gone: whoever waits gets the reason.
            self._open = False
            self._fail_pending(error)
            raise

    def _read_inbox(self) -> None:
        """Handle every message; wait for one if there is nothing else to do."""
        if not self._engine.has_work:
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _deliver(self, step: EngineStep) -> None:
        for request_id, tokens in step.tokens.items():
            on_tokens = self._pending[request_id].on_tokens
            if on_tokens is not None:
                on_tokens(tokens)
        for outcome in step.finished:
            self._pending.pop(outcome.request_id).outcome.set_result(outcome)

    def _fail_pending(self, error: BaseException) -> None:
        for pending in self._pending.values():
            pending.outcome.set_exception(error)
        self._pending.clear()
