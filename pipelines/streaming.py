"""Answers piece by piece, for threads and for event loops."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from cacheblend.request import RequestOutcome
from pipelines.answer import Answer
from pipelines.detokenizer import Detokenizer
from pipelines.errors import PipelineError

T = TypeVar("T")


class AnswerStream:
    """The text of an answer as it is generated; iterate once.

    Args:
        detokenizer: turns ids into text.
        abort: ends the request.
    """

    def __init__(self, detokenizer: Detokenizer, abort: Callable[[], None]) -> None:
        self._detokenizer = detokenizer
        self._abort = abort
        self._tokens: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._outcome: Future[RequestOutcome] | None = None
        self._to_answer: Callable[[RequestOutcome], Answer] | None = None

    def put(self, token_ids: tuple[int, ...]) -> None:
        """New ids; called on the engine's thread."""
        self._tokens.put(token_ids)

    def attach(self, outcome: Future[RequestOutcome], to_answer: Callable[[RequestOutcome], Answer]) -> None:
        """Name the future outcome, which ends the stream, and how it becomes an answer."""
        self._outcome, self._to_answer = outcome, to_answer
        outcome.add_done_callback(lambda _: self._tokens.put(None))

    def __iter__(self) -> Iterator[str]:
        try:
            while (token_ids := self._tokens.get()) is not None:
                if piece := self._detokenizer.add(token_ids):
                    yield piece
            # For whoever iterates again: the end, instead of a wait for tokens that never come.
            self._tokens.put(None)
            self.answer  # noqa: B018 - a request that failed raises here, not at some later call
            if piece := self._detokenizer.finish():
                yield piece
        finally:
            self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer; waits for its end.

        Raises:
            BlendError: what the request was refused with.
        """
        assert self._outcome is not None
        assert self._to_answer is not None
        return self._to_answer(self._outcome.result())

    def close(self) -> None:
        """End the request if it still runs."""
        if self._outcome is not None and not self._outcome.done():
            self._abort()


class AsyncAnswerStream:
    """The text of an answer as it is generated, for event loops; iterate once, with `async for`.

    The question is asked when the first piece, or the answer, is waited for. Leaving early, by `aclose`, by
    cancelling what waits, or by dropping the stream, ends the request.

    Args:
        open_stream: asks the question; cancelling it asks nothing.
    """

    def __init__(self, open_stream: Callable[[], Awaitable[AnswerStream]]) -> None:
        self._open_stream = open_stream
        # A piece and the answer may be waited for at once, and the question is asked once.
        self._opening = asyncio.Lock()
        self._stream: AnswerStream | None = None
        self._pieces: Iterator[str] = iter(())
        self._closed = False

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        if self._closed:
            raise StopAsyncIteration
        await self._opened()
        piece = await self._wait_for(lambda: next(self._pieces, None))
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def answer(self) -> Answer:
        """The whole answer, with its sources and its account; waits for its end.

        Raises:
            PipelineError: if the stream was closed before the question was asked.
            PipelineError, BlendError, RetrievalError: what the question was refused with.
        """
        stream = await self._opened()
        return await self._wait_for(lambda: stream.answer)

    async def aclose(self) -> None:
        """End the request if it still runs."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    async def _opened(self) -> AnswerStream:
        async with self._opening:
            if self._stream is None:
                if self._closed:
                    raise PipelineError("The stream was closed before its question was asked; ask it anew.")
                self._stream = await self._open_stream()
                self._pieces = iter(self._stream)
                if self._closed:
                    self._stream.close()
            return self._stream

    async def _wait_for(self, wait: Callable[[], T]) -> T:
        """Wait on a thread, and end the request if that is cancelled."""
        try:
            return await asyncio.to_thread(wait)
        except BaseException:
            await self.aclose()
            raise
