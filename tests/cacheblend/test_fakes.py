"""The fakes keep to the contracts of the protocols they stand in for."""

from __future__ import annotations

import pytest
from cacheblend_samples import identity_of, plan_of

from cacheblend.errors import BlendError
from cacheblend.plan import Policy, full_prefill_plan
from cacheblend.protocols import Advice, FinishReason, QuestionFinished
from cacheblend.sampling_params import SamplingParams
from cacheblend.testing import FakePredictor, FakePrefetcher, FakeRunner, FakeScheduler
from kvstore.errors import UnavailableReason
from kvstore.tiers import Tier
from kvstore.transfer import TransferOrder

A, B = identity_of(1), identity_of(2)


def to_host(*chunks):
    return tuple(TransferOrder(chunk, Tier.HOST) for chunk in chunks)


def test_the_fake_runner_steps_like_a_runner():
    runner = FakeRunner()
    runner.prefill([1, 2], SamplingParams(max_tokens=2), "a")
    runner.prefill(plan_of([A]), SamplingParams(max_tokens=3), "b")
    outputs = [runner.step() for _ in range(4)]
    assert [output.step_id for output in outputs] == [1, 2, 3, 4]
    assert [set(output.tokens) for output in outputs] == [{"a", "b"}, {"a", "b"}, {"b"}, set()]
    assert outputs[1].finished == {"a": FinishReason.LENGTH}
    assert (runner.report("a").mode, runner.report("b").mode) == ("full", "blend")
    runner.release("a")
    with pytest.raises(KeyError):
        runner.report("a")
    with pytest.raises(BlendError, match="'b' is in use"):
        runner.prefill([1], None, "b")


def test_its_tokens_follow_from_the_effective_plan():
    plan = plan_of([A, B])
    tokens = [FakeRunner.token(each, 0) for each in (plan, plan.with_fresh({A.key: "missing"}), plan.as_full())]
    assert len(set(tokens)) == 3
    assert FakeRunner.token(plan.as_full("any reason"), 0) == tokens[2]
    stop = FakeRunner.token(plan, 1)
    runner = FakeRunner()
    runner.prefill(plan, SamplingParams(stop_token_ids=(stop,)), "a")
    assert dict(runner.step().finished) == {}
    assert runner.step().finished == {"a": FinishReason.STOP}


def test_the_fake_runner_aborts_refuses_and_fails_on_demand():
    runner = FakeRunner(max_model_len=10, refused={"bad": BlendError("No.")})
    with pytest.raises(BlendError, match=r"No\."):
        runner.prefill([1], None, "bad")
    with pytest.raises(BlendError, match="do not fit"):
        runner.prefill([1] * 10, SamplingParams(max_tokens=1), "long")
    runner.prefill([1], SamplingParams(max_tokens=9), "a")
    runner.abort("a")
    assert runner.step().finished == {"a": FinishReason.ABORT}
    runner.failure = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        runner.step()
    assert runner.collect([[5, 6]], [1]) == [runner.collected[0].key]


def test_the_fake_scheduler_admits_loads_once_and_counts_pins():
    scheduler = FakeScheduler(missing={B.key: "missing"}, promotions=to_host(B))
    first = scheduler.admit("1", plan_of([A, B, A]), Policy.BLEND)
    assert (first.loads, first.plan.fallback_reasons) == (to_host(A), ("missing",))
    assert scheduler.admit("2", plan_of([A]), Policy.BLEND).loads == ()
    assert scheduler.admit("3", plan_of([A]), Policy.FULL).plan.reused == ()
    assert scheduler.pinned() == 2
    with pytest.raises(BlendError, match="admitted before"):
        scheduler.admit("1", plan_of([A]), Policy.BLEND)
    for name in ("1", "2", "3", "nobody"):
        scheduler.release(name)
    assert scheduler.pinned() == 0
    assert [scheduler.step([]).promotions for _ in range(2)] == [to_host(B), ()]


def test_the_fake_predictor_says_what_it_is_told():
    predictor = FakePredictor([Advice(A, 1.0), Advice(B, 0.5)])
    assert [piece.chunk for piece in predictor.advice(1)] == [A]
    predictor.observe(QuestionFinished("a"))
    assert predictor.observed == [QuestionFinished("a")]


def test_the_fake_prefetcher_ends_transfers_by_itself_or_when_told():
    prefetcher = FakePrefetcher(failures={B.key: UnavailableReason.CHECKSUM}, nbytes=7)
    prefetcher.start(to_host(A, A, B))
    assert (prefetcher.started, prefetcher.in_flight()) == ([A.key, B.key], 2)
    assert [(result.ok, result.reason, result.nbytes) for result in prefetcher.poll()] == [
        (True, None, 7),
        (False, UnavailableReason.CHECKSUM, 0),
    ]
    assert prefetcher.poll() == []
    held = FakePrefetcher(by_itself=False)
    held.start([*to_host(A, B), TransferOrder(A, Tier.GPU)])
    assert held.wait([A.key], None) == {}
    held.finish(A.key)
    assert held.wait([A.key, B.key], None).keys() == {A.key}
    assert held.cancel(B.key)
    assert not held.cancel(B.key)
    assert [result.reason for result in held.poll()] == [None, UnavailableReason.CANCELLED]
    held.finish(A.key, Tier.GPU)
    assert [(result.tier_from, result.target) for result in held.poll()] == [(Tier.HOST, Tier.GPU)]
    held.close()
    assert held.closed


def test_bare_token_ids_are_a_full_prefill():
    runner = FakeRunner()
    name = runner.prefill([1, 2, 3])
    assert runner.plans[name] == full_prefill_plan([1, 2, 3])
