"""`BlendEngine` over fakes: the messages between the four parts, and what an end leaves behind in every state."""

from __future__ import annotations

import pytest
from cacheblend_samples import identity_of, plan_of, tiny_kv

from cacheblend.engine import BlendEngine
from cacheblend.errors import BlendError
from cacheblend.plan import Policy, full_prefill_plan
from cacheblend.protocols import (
    Admission,
    Advice,
    CandidatesSeen,
    Eviction,
    FinishReason,
    PrefillHints,
    QuestionFinished,
    QuestionQueued,
    QuestionStarted,
    TokensGenerated,
)
from cacheblend.request import EngineRequest
from cacheblend.sampling_params import SamplingParams
from cacheblend.selectors import make_selector
from cacheblend.testing import FakePredictor, FakePrefetcher, FakeRunner, FakeScheduler
from kvstore.errors import UnavailableReason
from kvstore.events import Evicted, Published
from kvstore.store import ChunkStore
from kvstore.tiers import Tier
from kvstore.transfer import TransferOrder, TransferResult

A, B, C, D = (identity_of(i) for i in (1, 2, 3, 4))
TWO = SamplingParams(max_tokens=2)


def to_host(*chunks):
    return [TransferOrder(chunk, Tier.HOST) for chunk in chunks]


def to_gpu(*chunks):
    return [TransferOrder(chunk, Tier.GPU) for chunk in chunks]


class Bench:
    """An engine over fakes and a store in memory; `failures` and the like go to the fakes."""

    def __init__(self, *, by_itself=True, failures=None, nbytes=0, max_running=8, pieces=(), refused=None, **scheduler):
        self.store = ChunkStore(None, 1 << 20)
        self.runner = FakeRunner(bytes_per_token=16, refused=refused)
        self.scheduler = FakeScheduler(**scheduler)
        self.predictor = FakePredictor(pieces)
        self.prefetcher = FakePrefetcher(by_itself, failures, nbytes)
        self.engine = BlendEngine(
            self.runner, self.store, self.scheduler, self.predictor, self.prefetcher, max_running=max_running
        )

    def submit(self, name, plan, sampling=TWO, **settings):
        self.engine.submit(EngineRequest(name, plan, sampling=sampling, **settings))

    def run(self, limit=50):
        """Step until there is no work: outcomes by request."""
        outcomes = {}
        for _ in range(limit):
            if not self.engine.has_work:
                return outcomes
            for outcome in self.engine.step().finished:
                assert outcome.request_id not in outcomes, "a request ended twice"
                outcomes[outcome.request_id] = outcome
        raise AssertionError(f"the engine still has work after {limit} steps")

    def assert_nothing_left(self):
        assert self.store.pinned_count() == 0
        assert self.scheduler.pinned() == 0
        assert self.runner.live == set()
        assert sorted(self.scheduler.released) == sorted(set(self.scheduler.released))
        assert not self.engine.has_work


def tokens_of(plan, count=2):
    return tuple(FakeRunner.token(plan, i) for i in range(count))


def test_a_request_passes_through_all_four_parts():
    bench = Bench(nbytes=64)
    plan = plan_of([A, B, A])
    bench.submit("q", plan, hints=PrefillHints(candidates=(C, D)))
    outcome = bench.run()["q"]
    assert outcome.token_ids == tokens_of(plan)
    assert outcome.finish_reason is FinishReason.LENGTH
    assert bench.scheduler.admitted == bench.scheduler.released == ["q"]
    assert bench.prefetcher.started == [A.key, B.key]
    assert bench.runner.plans == {"q": plan}
    first, second = outcome.token_ids
    assert bench.predictor.observed == [
        QuestionQueued("q", (A, B)),
        CandidatesSeen("q", (C, D)),
        QuestionStarted("q"),
        TokensGenerated("q", (first,)),
        TokensGenerated("q", (second,)),
        QuestionFinished("q"),
    ]
    bench.assert_nothing_left()


def test_nothing_runs_before_its_chunks_have_come():
    bench = Bench(by_itself=False)
    bench.submit("q", plan_of([A, B]))
    for key in (A.key, B.key):
        step = bench.engine.step()
        assert (step.step_id, step.tokens) == (None, {})
        assert bench.runner.plans == {}
        assert bench.store.pinned_count() == 2
        bench.prefetcher.finish(key)
    assert bench.engine.step().tokens.keys() == {"q"}
    bench.run()
    bench.assert_nothing_left()


def test_a_request_whose_chunks_are_there_does_not_wait_for_one_that_loads():
    bench = Bench(by_itself=False)
    bench.submit("slow", plan_of([A]))
    bench.submit("ready", full_prefill_plan([1, 2, 3]))
    assert bench.engine.step().tokens.keys() == {"ready"}
    assert bench.prefetcher.waits == []
    bench.engine.step()
    assert set(bench.runner.plans) == {"ready"}
    bench.prefetcher.finish(A.key)
    assert set(bench.run()) == {"slow"}


def test_a_step_that_only_waits_comes_back_though_the_transfer_does_not():
    """So that an abort or a new request is heard while a disk hangs."""
    bench = Bench(by_itself=False)
    bench.submit("q", plan_of([A]))
    for _ in range(3):
        assert bench.engine.step().step_id is None
    assert bench.engine.has_work
    assert len(bench.prefetcher.waits) == 3
    assert all(limit is not None and 0 < limit < 1 for limit in bench.prefetcher.waits)


@pytest.mark.parametrize("reason", [UnavailableReason.CHECKSUM, UnavailableReason.TRUNCATED, UnavailableReason.EVICTED])
def test_a_failed_transfer_makes_exactly_that_chunk_fresh_and_says_why(reason):
    bench = Bench(failures={B.key: reason})
    plan = plan_of([A, B, C])
    bench.submit("q", plan)
    outcome = bench.run()["q"]
    assert bench.runner.plans["q"] == plan.with_fresh({B.key: reason.value})
    assert bench.runner.plans["q"].keys == (A.key, C.key)
    assert outcome.report.fallback_reasons == (reason.value,)
    assert outcome.report.mode == "blend"
    assert bench.scheduler.unavailable == [B.key]
    assert bench.scheduler.not_loaded == []
    bench.assert_nothing_left()


@pytest.mark.parametrize("reason", [UnavailableReason.HOST_BUDGET, UnavailableReason.CANCELLED])
def test_a_sound_chunk_that_found_no_room_is_read_through(reason):
    bench = Bench(failures={A.key: reason})
    plan = plan_of([A, B])
    bench.submit("q", plan)
    outcome = bench.run()["q"]
    assert bench.runner.plans["q"] == plan
    assert outcome.report.fallback_reasons == ()
    assert bench.scheduler.not_loaded == [(A.key, Tier.HOST)]
    assert bench.scheduler.unavailable == []


def test_a_failure_concerns_every_request_that_waited_for_the_chunk_and_no_other():
    bench = Bench(by_itself=False, failures={A.key: UnavailableReason.CHECKSUM})
    plans = {"1": plan_of([A]), "2": plan_of([B, A]), "3": plan_of([B])}
    for name, plan in plans.items():
        bench.submit(name, plan)
    bench.engine.step()
    bench.prefetcher.finish(A.key)
    bench.prefetcher.finish(B.key)
    outcomes = bench.run()
    assert {name: outcome.report.fallback_reasons for name, outcome in outcomes.items()} == {
        "1": ("checksum",),
        "2": ("checksum",),
        "3": (),
    }
    assert bench.scheduler.unavailable == [A.key]


def test_a_chunk_wanted_by_many_is_started_once_and_all_wait_for_it():
    bench = Bench(by_itself=False)
    for name in "123":
        bench.submit(name, plan_of([A], question=(int(name),)))
    bench.engine.step()
    bench.engine.step()
    assert bench.prefetcher.started == [A.key]
    assert bench.runner.plans == {}
    bench.prefetcher.finish(A.key)
    assert set(bench.run()) == {"1", "2", "3"}
    bench.assert_nothing_left()


def test_bytes_are_counted_by_the_tier_they_came_from():
    bench = Bench(nbytes=4 * 16)
    bench.submit("cold", plan_of([A, B]))
    cold = bench.run()["cold"].report.bytes_loaded
    bench.submit("warm", plan_of([A, C]))
    warm = bench.run()["warm"].report.bytes_loaded
    assert cold == {"disk": 2 * 4 * 16}
    assert warm == {"host": 4 * 16, "disk": 4 * 16}


def test_the_scheduler_follows_the_store_in_order():
    bench = Bench()
    bench.store.put(tiny_kv(A))
    bench.store.evict(A.key, Tier.HOST)
    bench.submit("q", full_prefill_plan([1]))
    bench.engine.step()
    assert [type(event) for event in bench.scheduler.events] == [Published, Evicted]
    bench.engine.close()
    bench.store.put(tiny_kv(A))
    bench.submit("late", full_prefill_plan([1]))
    bench.engine.step()
    assert len(bench.scheduler.events) == 2


def test_what_the_scheduler_evicts_leaves_the_host_before_anything_is_loaded():
    bench = Bench(by_itself=False, evictions=[Eviction(C.key, "admission")])
    bench.store.put(tiny_kv(C))
    seen = []
    start = bench.prefetcher.start
    bench.prefetcher.start = lambda chunks: (seen.append(bench.store.lookup(C)), start(chunks))
    bench.submit("q", plan_of([A]))
    bench.engine.step()
    assert seen[0] is None
    assert bench.scheduler.events[-1] == Evicted(C.key, Tier.HOST, tiny_kv(C).nbytes)


def test_promotions_are_started_and_waited_for_by_requests_that_want_them():
    bench = Bench(by_itself=False, promotions=to_host(A))
    bench.submit("first", full_prefill_plan([1]), SamplingParams(max_tokens=4))
    bench.engine.step()
    assert bench.prefetcher.started == [A.key]
    bench.scheduler._asked.add(A.key)
    bench.submit("wants it", plan_of([A]))
    bench.engine.step()
    assert set(bench.runner.plans) == {"first"}
    bench.prefetcher.finish(A.key)
    assert bench.run()["wants it"].report.reused_tokens == 4


def test_what_goes_to_the_gpu_is_started_and_nobody_waits_for_it():
    bench = Bench(by_itself=False, promotions=to_gpu(B), after_use=to_gpu(A))
    bench.scheduler._asked.update((A.key, B.key))
    bench.submit("q", plan_of([A, B]))
    assert bench.engine.step().tokens.keys() == {"q"}
    assert bench.prefetcher.orders == [*to_gpu(A), *to_gpu(B)]
    bench.prefetcher.finish(A.key, Tier.GPU)
    outcome = bench.run()["q"]
    assert outcome.token_ids == tokens_of(plan_of([A, B]))
    assert outcome.report.bytes_loaded == {"host": 8 * 16}
    bench.assert_nothing_left()


def test_a_chunk_that_did_not_come_to_the_gpu_changes_no_plan_and_its_room_is_free_again():
    bench = Bench(failures={A.key: UnavailableReason.HOST_BUDGET}, after_use=to_gpu(A))
    bench.store.put(tiny_kv(A))
    bench.scheduler._asked.add(A.key)
    plan = plan_of([A])
    bench.submit("q", plan)
    assert bench.run()["q"].report.fallback_reasons == ()
    assert bench.runner.plans["q"] == plan
    assert bench.scheduler.not_loaded == [(A.key, Tier.GPU)]
    assert bench.scheduler.unavailable == []


def test_a_load_of_what_was_there_already_gives_its_room_back():
    bench = Bench(by_itself=False)
    bench.submit("q", plan_of([A]))
    bench.engine.step()
    bench.prefetcher._end(TransferResult(A.key, True, None, 0, 0.0, Tier.HOST))
    bench.run()
    assert bench.scheduler.not_loaded == [(A.key, Tier.HOST)]


class Evicting:
    """Notes what a store is asked to evict, and from where."""

    def __init__(self, store):
        self.asked = []
        evict = store.evict
        store.evict = lambda key, tier: (self.asked.append((key, tier)), evict(key, Tier.HOST))[1]


def test_an_eviction_is_carried_out_in_its_tier():
    bench = Bench(evictions=[Eviction(C.key, "admission", Tier.GPU), Eviction(D.key, "admission")])
    evicting = Evicting(bench.store)
    bench.submit("q", plan_of([A]))
    bench.run()
    assert evicting.asked == [(C.key, Tier.GPU), (D.key, Tier.HOST)]


def answers(pieces, **settings):
    bench = Bench(pieces=pieces, **settings)
    for name, plan in {"1": plan_of([A, B]), "2": plan_of([C]), "3": full_prefill_plan([5, 6])}.items():
        bench.submit(name, plan, hints=PrefillHints(candidates=(D,)))
    outcomes = bench.run()
    bench.assert_nothing_left()
    return {name: (outcome.token_ids, outcome.report.fallback_reasons) for name, outcome in outcomes.items()}


def test_advice_that_never_comes_or_makes_no_sense_changes_no_token():
    stranger = identity_of(99, model="another")
    plain = answers([])
    assert len(plain) == 3
    assert answers([Advice(A, 1.0), Advice(C, 0.5)]) == plain
    assert answers([Advice(stranger, 7.0), Advice(stranger, -1.0), Advice(D, float("nan"))] * 50) == plain
    assert answers([], promotions=to_host(D, stranger)) == plain


def test_advice_is_taken_piece_by_piece_up_to_the_limit():
    bench = Bench(pieces=[Advice(identity_of(i), 1.0) for i in range(10, 40)])
    bench.submit("q", full_prefill_plan([1]))
    bench.run()
    assert all(len(advice) == 16 for advice in bench.scheduler.advice)


@pytest.mark.parametrize("state", ["waiting", "loading", "running", "unknown", "finished"])
def test_an_abort_in_any_state_ends_that_request_alone_and_leaves_nothing(state):
    bench = Bench(by_itself=False, max_running=2)
    bench.submit("other", full_prefill_plan([1, 2]), SamplingParams(max_tokens=6))
    names = {"waiting": "third", "loading": "second", "running": "other", "unknown": "nobody", "finished": "second"}
    bench.submit("second", plan_of([A]))
    bench.submit("third", plan_of([B]))
    bench.engine.step()
    outcomes = {}
    if state == "finished":
        bench.prefetcher.finish(A.key)
        while "second" not in outcomes:
            outcomes.update({outcome.request_id: outcome for outcome in bench.engine.step().finished})
    bench.engine.abort(names[state])
    bench.engine.abort(names[state])
    bench.prefetcher._by_itself = True
    outcomes.update(bench.run())
    assert set(outcomes) == {"other", "second", "third"}
    aborted = {name for name, outcome in outcomes.items() if outcome.finish_reason is FinishReason.ABORT}
    assert aborted == ({names[state]} if state in ("waiting", "loading", "running") else set())
    assert bench.predictor.observed.count(QuestionFinished(names[state])) == (state != "unknown")
    bench.assert_nothing_left()


def test_an_aborted_request_keeps_the_tokens_it_had():
    bench = Bench()
    plan = plan_of([A])
    bench.submit("q", plan, SamplingParams(max_tokens=9))
    for _ in range(3):
        bench.engine.step()
    bench.engine.abort("q")
    outcome = bench.run()["q"]
    assert outcome.token_ids == tokens_of(plan, 3)
    assert outcome.ttft_ms is not None


def test_a_request_that_never_ran_has_no_times_of_tokens():
    bench = Bench(by_itself=False)
    bench.submit("q", plan_of([A]))
    bench.engine.step()
    bench.engine.abort("q")
    outcome = bench.run()["q"]
    assert (outcome.ttft_ms, outcome.tpot_ms, outcome.token_ids) == (None, None, ())
    assert outcome.queue_ms >= 0


def test_only_so_many_run_at_a_time_and_the_others_follow_in_order():
    bench = Bench(max_running=2)
    for i in range(5):
        bench.submit(str(i), full_prefill_plan([i + 1]))
    live = []
    order = []
    while bench.engine.has_work:
        order.extend(outcome.request_id for outcome in bench.engine.step().finished)
        live.append(len(bench.runner.live))
    assert max(live) <= 2
    assert order == ["0", "1", "2", "3", "4"]
    bench.assert_nothing_left()


def test_prompts_are_handed_over_up_to_a_number_of_rows_a_step(monkeypatch):
    import cacheblend.engine

    monkeypatch.setattr(cacheblend.engine, "MAX_PREFILL_ROWS", 10)
    bench = Bench()
    for name, rows in (("a", 6), ("b", 4), ("c", 25), ("d", 1)):
        bench.submit(name, full_prefill_plan(range(1, rows + 1)), SamplingParams(max_tokens=9))
    begun = []
    for _ in range(3):
        bench.engine.step()
        begun.append("".join(bench.runner.plans))
    assert begun == ["ab", "abc", "abcd"]


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    bench = Bench(by_itself=False, max_running=1)
    bench.submit("a", plan_of([A]))
    bench.submit("b", plan_of([A]))
    for _ in range(2):
        for name in ("a", "b"):
            with pytest.raises(BlendError, match=f"'{name}' is in use"):
                bench.submit(name, plan_of([A]))
        bench.engine.step()
    bench.prefetcher.finish(A.key)
    bench.run()
    bench.submit("a", full_prefill_plan([1]))
    assert set(bench.run()) == {"a"}


def test_a_prompt_that_does_not_fit_is_refused_at_submission():
    bench = Bench()
    with pytest.raises(BlendError, match="do not fit"):
        bench.submit("q", full_prefill_plan(range(1, 4096)))
    assert not bench.engine.has_work
    assert bench.predictor.observed == []


def test_a_prompt_that_the_runner_refuses_ends_alone_with_the_reason():
    refusal = BlendError("Stop strings need a tokenizer.")
    bench = Bench(refused={"bad": refusal})
    bench.submit("good", plan_of([A]))
    bench.submit("bad", plan_of([A, B]))
    outcomes = bench.run()
    assert outcomes["bad"].error is refusal
    assert outcomes["bad"].finish_reason is FinishReason.ERROR
    assert outcomes["good"].error is None
    assert outcomes["good"].finish_reason is FinishReason.LENGTH
    bench.assert_nothing_left()


def test_a_failure_in_the_middle_of_a_step_comes_out_and_closing_still_gives_everything_back():
    bench = Bench(max_running=2)
    for name in "abc":
        bench.submit(name, plan_of([A]), SamplingParams(max_tokens=9))
    bench.engine.step()
    bench.runner.failure = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        bench.engine.step()
    bench.engine.close()
    assert bench.store.pinned_count() == 0
    assert bench.scheduler.pinned() == 0
    assert bench.runner.live == set()
    assert bench.prefetcher.closed


def test_closing_in_every_state_gives_everything_back():
    bench = Bench(by_itself=False, max_running=2)
    bench.submit("running", full_prefill_plan([1]), SamplingParams(max_tokens=9))
    bench.submit("loading", plan_of([A]))
    bench.submit("waiting", plan_of([B]))
    bench.engine.step()
    bench.engine.close()
    assert bench.store.pinned_count() == 0
    assert bench.scheduler.pinned() == 0
    assert bench.runner.live == set()
    assert sorted(bench.scheduler.released) == ["loading", "running", "waiting"]
    assert bench.prefetcher.closed


def test_the_policy_full_pins_and_loads_nothing():
    bench = Bench()
    bench.submit("q", plan_of([A]), policy=Policy.FULL)
    outcome = bench.run()["q"]
    assert outcome.report.mode == "full"
    assert bench.prefetcher.started == []


def test_a_request_that_recomputes_everything_waits_for_no_load_pins_nothing_and_tells_of_no_chunk():
    bench = Bench(by_itself=False)
    everything = plan_of([A], make_selector("query", 1.0))
    bench.submit("reads", plan_of([A]))
    bench.submit("computes", everything)
    bench.engine.step()
    assert bench.prefetcher.started == [A.key]
    assert bench.runner.plans == {"computes": everything}
    assert bench.predictor.observed[:2] == [QuestionQueued("reads", (A,)), QuestionQueued("computes", ())]
    bench.engine.abort("reads")
    assert bench.store.pinned_count() == 0
    bench.engine.close()


class GivesUp(FakeScheduler):
    """Prefills everything, for a reason it does not note on the segments."""

    def admit(self, request_id, plan, policy):
        admission = super().admit(request_id, plan, policy)
        return Admission(admission.plan.as_full(), (), (), "too_busy")


def test_the_schedulers_reason_joins_those_of_the_chunks_and_hides_none():
    bench = Bench(missing={B.key: "missing"})
    bench.engine._scheduler = bench.scheduler = GivesUp({B.key: "missing"})
    bench.submit("q", plan_of([A, B]))
    outcome = bench.run()["q"]
    assert outcome.report.fallback_reasons == ("missing", "too_busy")


def test_a_step_without_work_does_nothing():
    bench = Bench()
    assert not bench.engine.has_work
    step = bench.engine.step()
    assert (step.step_id, step.tokens, step.finished) == (None, {}, ())
