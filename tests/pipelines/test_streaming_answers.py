"""Answers piece by piece: what arrives when, how a stream ends, and what ending it early does."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from transformers import AutoTokenizer

from cacheblend.sampling_params import SamplingParams
from pipelines.detokenizer import Detokenizer
from pipelines.errors import PipelineError
from pipelines.streaming import AnswerStream

DOCUMENTS = ["The mill of Harrow burned in 1841.", "The ferry at Oss sank in 1902."]
QUESTION = "When did the mill burn?"
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def rag(make_rag):
    pipeline = make_rag(DOCUMENTS)
    pipeline.precompute()
    return pipeline


def running(pipeline):
    """The ids of the sequences the runner holds, seen between two steps."""
    return pipeline._loop.call(lambda: list(pipeline.runner._sequences))


class Source:
    """A stream that the test feeds."""

    def __init__(self, folder, stop=()):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.outcome = Future()
        self.aborted = 0
        self.stream = AnswerStream(Detokenizer(self.tokenizer, stop), self.abort)
        self.stream.attach(self.outcome, lambda outcome: f"answer of {outcome}")

    def abort(self):
        self.aborted += 1

    def feed(self, text):
        self.stream.put(tuple(self.tokenizer(text, add_special_tokens=False).input_ids))


def test_pieces_arrive_while_the_answer_is_still_being_made(tiny_rag_model):
    source = Source(tiny_rag_model)
    pieces = iter(source.stream)
    source.feed("The mill")
    assert next(pieces) == "The mill"
    source.feed(" burned")
    assert next(pieces) == " burned"
    assert not source.outcome.done()
    source.outcome.set_result("the request")
    assert list(pieces) == []
    assert source.stream.answer == "answer of the request"
    assert source.aborted == 0


def test_what_was_held_back_comes_at_the_end(tiny_rag_model):
    source = Source(tiny_rag_model, stop=("in 1842",))
    source.feed("burned in 1841")
    source.feed(" or in 18")
    source.outcome.set_result("it")
    assert list(source.stream) == ["burned in 1841", " or ", "in 18"]


def test_a_request_that_fails_raises_where_the_text_would_go_on(tiny_rag_model):
    source = Source(tiny_rag_model)
    source.feed("The mill")
    source.outcome.set_exception(PipelineError("The pipeline was closed."))
    pieces = iter(source.stream)
    assert next(pieces) == "The mill"
    with pytest.raises(PipelineError, match="was closed"):
        next(pieces)
    with pytest.raises(PipelineError, match="was closed"):
        source.stream.answer  # noqa: B018


def test_leaving_a_stream_early_ends_its_request_once(tiny_rag_model):
    source = Source(tiny_rag_model)
    source.feed("The mill")
    for _ in source.stream:
        break
    assert source.aborted == 1
    source.outcome.set_result("it")
    source.stream.close()
    assert source.aborted == 1


def test_iterating_a_second_time_ends_instead_of_waiting_for_ever(tiny_rag_model):
    source = Source(tiny_rag_model)
    source.feed("The mill")
    source.outcome.set_result("it")
    assert list(source.stream) == ["The mill"]
    assert list(source.stream) == []


def test_streamed_pieces_and_the_answer_are_one_text_with_and_without_stop_strings(rag):
    whole = rag.run(QUESTION, sampling=SamplingParams(max_tokens=24, ignore_eos=True))
    assert whole.meta.finish_reason == "length"
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 4]
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=("\x00 never", stop))
    stream = rag.stream(QUESTION, sampling=params)
    text = "".join(stream)
    assert text.strip() == stream.answer.text == rag.run(QUESTION, sampling=params).text
    assert stream.answer.meta.finish_reason == "stop"
    assert stop not in text
    assert whole.text.startswith(text.strip())
    assert stream.answer.meta.new_tokens < 24


def test_closing_a_stream_ends_its_request_in_the_engine(rag):
    stream = rag.stream(QUESTION, sampling=ENDLESS)
    assert next(iter(stream))
    stream.close()
    answer = stream.answer
    assert answer.meta.finish_reason == "abort"
    assert 0 < answer.meta.new_tokens < ENDLESS.max_tokens
    assert running(rag) == []
    assert rag.store.pinned_count() == 0


def test_leaving_an_asynchronous_stream_ends_its_request_and_blocks_nobody(rag):
    async def leave_early():
        stream = rag.astream(QUESTION, sampling=ENDLESS)
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        async for piece in stream:
            assert piece
            break
        await stream.aclose()
        ticking.cancel()
        return ticks

    assert asyncio.run(leave_early()) > 0
    while running(rag):
        pass
    assert rag.store.pinned_count() == 0


def test_an_asynchronous_stream_that_is_cancelled_while_it_waits_ends_its_request(rag):
    async def cancel():
        async def read():
            async for _ in rag.astream(QUESTION, sampling=ENDLESS):
                started.set()

        started = asyncio.Event()
        reading = asyncio.create_task(read())
        await started.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(cancel())
    while running(rag):
        pass
    assert rag.run(QUESTION).text


def test_an_asynchronous_stream_gives_the_whole_answer_too_and_asks_once(rag):
    whole = rag.run(QUESTION)

    async def read():
        stream = rag.astream(QUESTION)
        waiting = asyncio.create_task(stream.answer())
        pieces = [piece async for piece in stream]
        return "".join(pieces), await waiting, await stream.answer(), await rag.astream(QUESTION).answer()

    text, *answers = asyncio.run(read())
    assert text.strip() == whole.text
    for answer in answers:
        assert (answer.text, answer.sources) == (whole.text, whole.sources)
        assert answer.meta.new_tokens == whole.meta.new_tokens
    assert answers[0].meta == answers[1].meta


def test_closing_an_asynchronous_stream_ends_its_request_and_its_pieces(rag):
    async def close():
        stream = rag.astream(QUESTION, sampling=ENDLESS)
        assert await anext(stream)
        await stream.aclose()
        assert [piece async for piece in stream] == []
        return await stream.answer()

    answer = asyncio.run(close())
    assert answer.meta.finish_reason == "abort"
    assert running(rag) == []


def test_cancelling_the_wait_for_an_asynchronous_answer_ends_its_request(rag):
    async def cancel():
        stream = rag.astream(QUESTION, sampling=ENDLESS)
        assert await anext(stream)
        waiting = asyncio.create_task(stream.answer())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await stream.answer()

    assert asyncio.run(cancel()).meta.finish_reason == "abort"


def test_an_asynchronous_stream_closed_before_it_was_read_asks_nothing(rag):
    async def close():
        stream = rag.astream(QUESTION)
        await stream.aclose()
        assert [piece async for piece in stream] == []
        await stream.answer()

    with pytest.raises(PipelineError, match="closed before its question was asked"):
        asyncio.run(close())


def test_what_cannot_be_streamed_raises_at_the_first_piece(rag):
    async def read():
        return [piece async for piece in rag.astream("")]

    with pytest.raises(PipelineError, match="question is empty"):
        asyncio.run(read())
