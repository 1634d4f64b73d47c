"""Answers piece by piece, for threads and for event loops."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

from cacheblend.request import RequestOutcome
from pipelines.answer import Answer
from pipelines.detokenizer import Detokenizer


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


async def stream_async(open_stream: Callable[[], AnswerStream]) -> AsyncIterator[str]:
    """The pieces of a stream without blocking the event loop; `open_stream` runs on a thread."""
    stream = await asyncio.to_thread(open_stream)
    pieces = iter(stream)
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
    finally:
        stream.close()
