"""`RagPipeline` on vLLM: the same questions, the same accounts, one cache folder with the reference engine."""

from __future__ import annotations

import asyncio
import time

import pytest

from cacheblend.sampling_params import SamplingParams
from pipelines.errors import PipelineError
from retrieval.documents import Document

pytest.importorskip("vllm")

ROCKS = [f"Lighthouse {number} stands on a rock and was lit in {1800 + number}." for number in range(4)]
FERRIES = [f"Ferry {number} leaves Harrow at {number} in the morning, with goats." for number in range(4, 8)]
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def cached(pipeline):
    """The rocks, precomputed by vLLM."""
    pipeline.add_documents([Document(f"rock-{n}", text) for n, text in enumerate(ROCKS)])
    return pipeline.precompute()


def test_auto_chooses_vllm_where_it_can_serve_the_model(pipeline, cached):
    assert pipeline.engine == "vllm"
    answer = pipeline.run("When?", documents=ROCKS)
    assert answer.meta.engine == "vllm"


def test_auto_leaves_a_model_that_vllm_cannot_serve_to_the_reference_engine(tiny_folder):
    from pipelines.runners import choose_engine

    assert choose_engine("auto", tiny_folder("llama-default")) == "reference"
    with pytest.raises(PipelineError, match="no heads of 16; use the engine `reference`"):
        choose_engine("vllm", tiny_folder("llama-default"))


def test_precomputing_counts_what_it_did_and_finds_it_again(pipeline, cached):
    assert (cached.chunks, cached.computed, cached.not_on_disk, cached.not_kept) == (4, 4, {}, 0)
    again = pipeline.precompute()
    assert (again.cached, again.computed) == (4, 0)


def test_an_answer_its_account_and_its_sources_are_the_reference_engines(pipeline, reference, cached):
    for options in ({}, {"selector": "none"}, {"policy": "full"}, {"selector": "deviation", "ratio": 0.3}):
        mine, theirs = (p.run("Which was lit first?", documents=ROCKS, **options) for p in (pipeline, reference))
        assert (mine.text, mine.sources) == (theirs.text, theirs.sources)
        for name in ("mode", "policy", "selector", "reused_tokens", "recomputed_tokens", "fallback_reasons"):
            assert getattr(mine.meta, name) == getattr(theirs.meta, name), name
        assert mine.meta.ttft_ms > 0
        assert mine.meta.tpot_ms > 0
        assert mine.meta.new_tokens == 6


def test_missing_chunks_are_reported_and_collected_afterwards_if_that_is_wished(pipeline):
    from pipelines.missed import MissedChunks

    answer = pipeline.run("When does it leave?", documents=FERRIES[:2])
    assert set(answer.meta.fallback_reasons) == {"missing"}
    assert answer.meta.mode == "full"
    pipeline._missed = MissedChunks(pipeline.runner, pipeline._loop, pipeline._planner.prefixes)
    try:
        pipeline.run("When does it leave?", documents=FERRIES[:2])
        pipeline._loop.call(lambda: None)
    finally:
        pipeline._missed = None
    assert pipeline.run("When does it leave?", documents=FERRIES[:2]).meta.fallback_reasons == ()


def test_a_question_is_answered_while_chunks_are_precomputed_by_another_engine(pipeline, reference):
    reference.runner.collect([c.token_ids for f in FERRIES[2:] for c in pipeline._corpus.chunk(Document("", f))],
                             pipeline._planner.prefixes.head)  # fmt: skip
    deadline = time.monotonic() + 30
    while (answer := pipeline.run("When?", documents=FERRIES[2:])).meta.fallback_reasons:
        assert time.monotonic() < deadline
    assert answer.meta.reused_tokens > 0


def test_a_stream_gives_the_answers_text_piece_by_piece(pipeline, cached):
    whole = pipeline.run("Which is oldest?", documents=ROCKS)
    stream = pipeline.stream("Which is oldest?", documents=ROCKS)
    assert "".join(stream).strip() == stream.answer.text == whole.text


def test_a_stop_string_ends_the_text_before_it(pipeline, cached):
    text = pipeline.run("Which?", documents=ROCKS, sampling=SamplingParams(max_tokens=30, ignore_eos=True)).text
    stop = text[len(text) // 2 :][:4]
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,))
    answer = pipeline.run("Which?", documents=ROCKS, sampling=sampling)
    assert answer.text == text[: text.find(stop)].strip()
    assert answer.meta.finish_reason == "stop"


def test_a_batch_gives_what_each_question_gives_alone(pipeline, cached):
    questions = ["Which was lit first?", "Which stands?", "When?"]
    alone = [pipeline.run(question, documents=ROCKS).text for question in questions]
    assert [answer.text for answer in pipeline.run_batch(questions, documents=ROCKS)] == alone
    assert [answer.text for answer in asyncio.run(pipeline.arun_batch(questions, documents=ROCKS))] == alone


def test_leaving_a_stream_ends_its_request_in_the_engine(pipeline, cached):
    stream = pipeline.stream("Which?", documents=ROCKS, sampling=ENDLESS)
    next(iter(stream))
    stream.close()
    assert stream.answer.meta.finish_reason == "abort"
    assert not pipeline._loop.call(pipeline.runner.engine.has_unfinished_requests)


def test_a_cancelled_question_ends_in_the_engine(pipeline, cached):
    async def ask_and_leave():
        task = asyncio.create_task(pipeline.arun("Which?", documents=ROCKS, sampling=ENDLESS))
        while not pipeline._loop.call(pipeline.runner.engine.has_unfinished_requests):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask_and_leave())
    deadline = time.monotonic() + 30
    while pipeline._loop.call(pipeline.runner.engine.has_unfinished_requests):
        assert time.monotonic() < deadline


def test_no_chunk_stays_pinned(pipeline, cached):
    core = pipeline.runner.engine.engine_core.engine_core
    assert core.scheduler.connector.scheduler_half.pinned() == 0
    assert pipeline.store.pinned_count() == 0
