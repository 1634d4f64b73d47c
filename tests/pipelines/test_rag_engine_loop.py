"""`EngineLoop`: whoever asks is answered, whatever happens to the engine meanwhile."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cacheblend.engine import BlendEngine
from cacheblend.errors import BlendError
from cacheblend.plan import full_prefill_plan
from cacheblend.protocols import FinishReason
from cacheblend.request import EngineRequest
from cacheblend.sampling_params import SamplingParams
from cacheblend.testing import FakePredictor, FakePrefetcher, FakeRunner, FakeScheduler
from kvstore.store import ChunkStore
from pipelines.engine_loop import EngineLoop
from pipelines.errors import PipelineError

PLAN = full_prefill_plan([1, 2, 3])
CLOSED = "The pipeline was closed before the question was answered"


class HeldRunner(FakeRunner):
    """A runner whose steps wait for the test where it says so."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.may_step, self.stepping = threading.Event(), threading.Event()
        self.may_step.set()

    def step(self):
        self.stepping.set()
        assert self.may_step.wait(30)
        return super().step()


class Bench:
    def __init__(self, **settings):
        self.runner = HeldRunner(**settings)
        self.prefetcher = FakePrefetcher()
        self.engine = BlendEngine(
            self.runner, ChunkStore(None, 1 << 20), FakeScheduler(), FakePredictor(), self.prefetcher
        )
        self.loop = EngineLoop(self.engine)

    def submit(self, name, count=3, on_tokens=None) -> Future:
        request = EngineRequest(name, PLAN, sampling=SamplingParams(max_tokens=count))
        return self.loop.submit(request, on_tokens)

    def hold(self):
        """Stop the engine in the middle of a step."""
        self.runner.may_step.clear()
        self.runner.stepping.clear()
        self.submit("held", 50)
        assert self.runner.stepping.wait(30)

    def close_meanwhile(self) -> threading.Thread:
        """Close from another thread; returns once the loop takes nothing more."""
        closing = threading.Thread(target=self.loop.close)
        closing.start()
        while self.loop._open:
            time.sleep(0.001)
        return closing


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.runner.may_step.set()
    bench.loop.close()


def test_requests_from_many_threads_are_each_answered_once(bench):
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda name: bench.submit(str(name)).result(30), range(40)))
    assert [outcome.request_id for outcome in outcomes] == [str(name) for name in range(40)]
    assert {outcome.token_ids for outcome in outcomes} == {tuple(FakeRunner.token(PLAN, i) for i in range(3))}


def test_tokens_are_handed_over_in_order_before_the_outcome(bench):
    seen = []
    outcome = bench.submit("a", 4, seen.append)
    outcome.add_done_callback(lambda _: seen.append("end"))
    assert outcome.result(30).token_ids == tuple(token for (token,) in seen[:4])
    bench.loop.call(lambda: None)
    assert seen[4:] == ["end"]


def test_an_abort_ends_one_request_and_unknown_ones_are_let_be(bench):
    bench.hold()
    first, second = bench.submit("first", 500), bench.submit("second")
    bench.loop.abort("first")
    bench.loop.abort("nobody")
    bench.runner.may_step.set()
    assert first.result(30).finish_reason is FinishReason.ABORT
    assert second.result(30).finish_reason is FinishReason.LENGTH


def test_a_request_that_is_refused_fails_alone(bench):
    too_long = bench.loop.submit(EngineRequest("long", PLAN, sampling=SamplingParams(max_tokens=9999)))
    with pytest.raises(BlendError, match="do not fit"):
        too_long.result(30)
    assert bench.submit("next").result(30).token_ids


def test_a_request_that_the_runner_refuses_fails_alone():
    refusal = BlendError("This prompt cannot be served.")
    bench = Bench(refused={"bad": refusal})
    bad, good = bench.submit("bad"), bench.submit("good")
    assert bad.exception(30) is refusal
    assert good.result(30).token_ids
    bench.loop.close()


def test_an_id_used_twice_fails_the_second_and_still_answers_the_first(bench):
    bench.hold()
    first, second = bench.submit("same"), bench.submit("same")
    bench.runner.may_step.set()
    with pytest.raises(BlendError, match="'same' is in use"):
        second.result(30)
    assert first.result(30).token_ids


def test_nobody_can_cancel_an_outcome_that_the_loop_will_resolve(bench):
    """`asyncio.wrap_future` tries to; setting a cancelled future's result would end the loop."""
    bench.hold()
    outcome = bench.submit("a")
    assert not outcome.cancel()
    bench.runner.may_step.set()
    assert outcome.result(30).token_ids
    assert bench.submit("b").result(30).token_ids


def test_calls_return_what_their_function_returns_or_raises(bench):
    assert bench.loop.call(lambda: threading.current_thread().name) == "blend-engine"
    with pytest.raises(ZeroDivisionError):
        bench.loop.call(lambda: 1 // 0)
    assert bench.submit("a").result(30).token_ids


def test_the_wait_for_a_busy_loop_counts_as_queueing_and_to_the_first_token(bench):
    busy, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bench.loop.call, lambda: (busy.set(), go_on.wait(30)))
        assert busy.wait(30)
        outcome = bench.submit("a")
        asked = time.perf_counter()
        time.sleep(0.05)
        waited_ms = (time.perf_counter() - asked) * 1e3
        go_on.set()
        result = outcome.result(30)
    assert result.ttft_ms >= result.queue_ms >= waited_ms


def test_closing_fails_running_requests_in_a_sentence(bench):
    bench.hold()
    outcome = bench.submit("a", 500)
    closing = bench.close_meanwhile()
    bench.runner.may_step.set()
    with pytest.raises(PipelineError, match=CLOSED):
        outcome.result(30)
    closing.join(30)
    assert bench.runner.live == set()
    assert bench.prefetcher.closed


def test_what_was_posted_before_closing_and_not_read_is_answered_too(bench):
    """Requests and calls that the loop had no time to look at must not wait for ever."""
    bench.hold()
    outcomes = [bench.submit(str(i)) for i in range(3)]
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(bench.loop.call, lambda: "never")
        while bench.loop._inbox.qsize() < 4:
            time.sleep(0.001)
        closing = bench.close_meanwhile()
        bench.runner.may_step.set()
        for waiting in (*outcomes, called):
            with pytest.raises(PipelineError, match=CLOSED):
                waiting.result(30)
    closing.join(30)


def test_after_closing_everything_is_refused_in_a_sentence_but_an_abort(bench):
    bench.loop.close()
    for use in (
        lambda: bench.submit("a"),
        lambda: bench.loop.call(lambda: None),
        lambda: bench.loop.post(lambda: None),
    ):
        with pytest.raises(PipelineError, match="The pipeline is closed; make a new one"):
            use()
    bench.loop.abort("a")
    bench.loop.close()


def test_closing_from_several_threads_returns_to_each_when_the_loop_has_ended(bench):
    bench.hold()
    closers = [threading.Thread(target=bench.loop.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    assert bench.loop._thread.is_alive()
    bench.runner.may_step.set()
    for closer in closers:
        closer.join(30)
        assert not bench.loop._thread.is_alive()


def test_a_failing_engine_fails_everyone_with_its_reason_and_gives_its_parts_back(bench):
    bench.hold()
    waiting = [bench.submit(str(i)) for i in range(3)]
    failure = RuntimeError("the device is gone")
    bench.runner.failure = failure
    bench.runner.may_step.set()
    for outcome in waiting:
        assert outcome.exception(30) is failure
    bench.loop._thread.join(30)
    with pytest.raises(PipelineError, match="closed"):
        bench.submit("late")
    assert bench.runner.live == set()
    assert bench.prefetcher.closed
    bench.loop.close()


def test_whenever_the_loop_closes_no_request_is_left_without_an_end():
    """Requests race with closing from four threads; every one is answered, failed or refused."""
    for _ in range(30):
        bench = Bench()
        ends = []

        def ask(first, bench=bench, ends=ends):
            for number in range(first, first + 20):
                try:
                    ends.append(bench.submit(str(number), 2))
                except PipelineError:
                    return

        askers = [threading.Thread(target=ask, args=(first,)) for first in (0, 100, 200, 300)]
        for asker in askers:
            asker.start()
        bench.loop.close()
        for asker in askers:
            asker.join(30)
        for outcome in ends:
            assert outcome.done()
            assert not outcome.cancelled()
            failure = outcome.exception(0)
            if failure is None:
                assert len(outcome.result(0).token_ids) == 2
            else:
                assert CLOSED in str(failure)
