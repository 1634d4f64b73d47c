"""One pipeline, many callers: threads, event loops, cancellation, and closing while answers are being made."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cacheblend.errors import BlendError
from cacheblend.protocols import FinishReason
from cacheblend.sampling_params import SamplingParams
from pipelines.errors import PipelineError

DOCUMENTS = [f"Lighthouse {number} stands on a rock and was lit in {1800 + number}." for number in range(8)]
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)


def cases():
    """Questions over other documents, in other orders, under other policies."""
    return [
        (
            f"When was lighthouse {number} lit?",
            {
                "documents": [DOCUMENTS[(number + step) % 8] for step in range(1 + number % 4)],
                **({"policy": "full"} if number % 5 == 0 else {"selector": ("query", "none", "deviation")[number % 3]}),
            },
        )
        for number in range(12)
    ]


@pytest.fixture(scope="module")
def rag(make_rag):
    pipeline = make_rag(DOCUMENTS)
    pipeline.precompute()
    return pipeline


@pytest.fixture
def slowly(monkeypatch):
    """Makes a pipeline's endless answers take much longer than any test looks at them."""

    def brake(pipeline):
        step = pipeline.runner.step
        monkeypatch.setattr(pipeline.runner, "step", lambda: (time.sleep(0.005), step())[1])
        return pipeline

    return brake


@pytest.fixture
def asked(rag, monkeypatch):
    """The outcomes of all requests that the pipeline submits from now on."""
    outcomes = []
    submit = rag._loop.submit

    def noting(*args):
        outcomes.append(submit(*args))
        return outcomes[-1]

    monkeypatch.setattr(rag._loop, "submit", noting)
    return outcomes


def running(pipeline):
    return pipeline._loop.call(lambda: list(pipeline.runner._sequences))


def test_questions_asked_at_once_are_answered_as_each_alone(rag):
    alone = [rag.run(question, **options) for question, options in cases()]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda case: rag.run(case[0], **case[1]), cases()))
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.meta.recomputed_tokens for answer in together] == [answer.meta.recomputed_tokens for answer in alone]
    assert rag.store.pinned_count() == 0
    assert running(rag) == []


def test_threads_retrieve_and_event_loops_ask_at_the_same_time(rag):
    question = "When was lighthouse 3 lit?"
    expected = rag.run(question)

    async def several():
        return await asyncio.gather(*(rag.arun(question) for _ in range(3)))

    with ThreadPoolExecutor(4) as pool:
        from_loops = [pool.submit(asyncio.run, several()) for _ in range(2)]
        from_threads = [pool.submit(rag.run, question) for _ in range(2)]
        answers = [answer for each in from_loops for answer in each.result(60)]
        answers += [each.result(60) for each in from_threads]
    assert {answer.text for answer in answers} == {expected.text}
    assert {answer.sources for answer in answers} == {expected.sources}


def test_a_small_host_and_many_callers_keep_the_budget_and_the_answers(make_rag, rag, tmp_path):
    chunk_bytes = len(rag.chunks[0].token_ids) * rag.runner.kv_bytes_per_token
    make_rag(DOCUMENTS, cache_dir=tmp_path).precompute()
    small = make_rag(DOCUMENTS, cache_dir=tmp_path, host_budget_bytes=2 * chunk_bytes + 1)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda case: small.run(case[0], **case[1]), cases() * 2))
    assert [answer.text for answer in answers] == [
        rag.run(question, **options).text for question, options in cases()
    ] * 2
    assert small.store.host_bytes_used <= 2 * chunk_bytes + 1
    assert all(answer.meta.fallback_reasons == () for answer in answers)


def test_a_cancelled_question_ends_and_the_next_one_is_answered(rag, slowly):
    slowly(rag)

    async def cancel():
        asking = asyncio.create_task(rag.arun_batch(["When?", "Where?"], documents=DOCUMENTS[:2], sampling=ENDLESS))
        while len(await asyncio.to_thread(running, rag)) < 2:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancel())
    while running(rag):
        pass
    assert rag.store.pinned_count() == 0
    assert rag.run("When was lighthouse 1 lit?").text


def test_ctrl_c_while_a_batch_is_waited_for_ends_all_its_requests(rag, slowly, asked):
    slowly(rag)

    def interrupt():
        while len(running(rag)) < 2:
            pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        rag.run_batch(["When?", "Where?"], documents=DOCUMENTS[:2], sampling=ENDLESS)
    interrupting.join(30)
    assert [outcome.result(60).finish_reason for outcome in asked] == [FinishReason.ABORT] * 2


def test_a_question_that_fails_in_an_asynchronous_batch_ends_the_others(rag, slowly, asked, monkeypatch):
    slowly(rag)
    prefill = rag.runner.prefill

    def refuse_the_third(plan, sampling, name, *rest):
        if len(rag.runner._sequences) == 2:
            raise BlendError("This prompt cannot be served.")
        return prefill(plan, sampling, name, *rest)

    monkeypatch.setattr(rag.runner, "prefill", refuse_the_third)
    with pytest.raises(BlendError, match="cannot be served"):
        asyncio.run(rag.arun_batch(["When?", "Where?", "Why?"], documents=DOCUMENTS[:2], sampling=ENDLESS))
    *others, _ = asked
    assert [outcome.result(60).finish_reason for outcome in others] == [FinishReason.ABORT] * 2


def test_an_asynchronous_stream_cancelled_while_it_is_opened_asks_nothing(rag, asked, monkeypatch):
    preparing, go_on = threading.Event(), threading.Event()
    prepare = rag.prepare

    def slow_prepare(*args, **options):
        preparing.set()
        assert go_on.wait(30)
        return prepare(*args, **options)

    monkeypatch.setattr(rag, "prepare", slow_prepare)

    async def cancel():
        first = asyncio.ensure_future(anext(rag.astream("When?", documents=DOCUMENTS[:2], sampling=ENDLESS)))
        await asyncio.to_thread(preparing.wait, 30)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go_on.set()

    # It returns when its threads have ended.
    asyncio.run(cancel())
    assert asked == []


def test_a_batch_with_a_question_that_cannot_be_answered_begins_none(rag):
    with pytest.raises(PipelineError, match="question is empty"):
        rag.run_batch(["When?", ""])
    assert running(rag) == []


def test_closing_while_answers_are_made_fails_whoever_waits_in_a_sentence(make_rag, slowly):
    pipeline = slowly(make_rag(DOCUMENTS))
    pipeline.precompute()

    async def ask():
        return await pipeline.arun("When?", documents=DOCUMENTS[:2], sampling=ENDLESS)

    stream = pipeline.stream("When?", documents=DOCUMENTS[:1], sampling=ENDLESS)
    pieces = iter(stream)
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(pipeline.run, "When?", documents=DOCUMENTS[:3], sampling=ENDLESS),
            pool.submit(pipeline.run_batch, ["When?", "Where?"], documents=DOCUMENTS[:2], sampling=ENDLESS),
            pool.submit(asyncio.run, ask()),
        ]
        next(pieces)
        while len(running(pipeline)) < 5:
            pass
        pipeline.close()
        for each in waiting:
            with pytest.raises(PipelineError, match="closed before the question was answered"):
                each.result(60)
    with pytest.raises(PipelineError, match="closed before the question was answered"):
        list(pieces)
    assert pipeline.store.pinned_count() == 0
    assert pipeline.runner._sequences == {}


def test_a_closed_pipeline_says_so_and_can_be_closed_again(make_rag):
    with make_rag(DOCUMENTS) as pipeline:
        pass
    pipeline.close()
    for use in (
        lambda: pipeline.run("When?", documents=DOCUMENTS[:1]),
        lambda: pipeline.stream("When?", documents=DOCUMENTS[:1]),
        pipeline.precompute,
    ):
        with pytest.raises(PipelineError, match="The pipeline is closed; make a new one"):
            use()


def test_a_runner_that_fails_in_the_middle_of_a_step_fails_the_questions_with_its_reason(make_rag, monkeypatch):
    pipeline = make_rag(DOCUMENTS)
    pipeline.precompute()

    def broken(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(pipeline.runner._blend, "run", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        pipeline.run("When?", documents=DOCUMENTS[:2])
    with pytest.raises(PipelineError, match="closed"):
        pipeline.run("When?", documents=DOCUMENTS[:2])
    assert pipeline.store.pinned_count() == 0
    assert pipeline.runner._sequences == {}
