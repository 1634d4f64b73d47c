"""Engines that schedule for themselves get every request as it stands; the others are scheduled for."""

from __future__ import annotations

import pytest
from cacheblend_samples import identity_of, plan_of

from cacheblend.assembly import make_engine
from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.protocols import FinishReason
from cacheblend.request import EngineRequest
from cacheblend.sampling_params import SamplingParams
from cacheblend.scheduling.delegated_scheduler import DelegatedScheduler, NoAdvice
from cacheblend.testing import FakeRunner
from kvstore.store import ChunkStore

A, B = identity_of(1), identity_of(2)


@pytest.mark.parametrize("policy", [Policy.BLEND, Policy.AUTO])
def test_a_plan_is_admitted_as_it_stands_and_nothing_is_moved_or_pinned(policy):
    scheduler, plan = DelegatedScheduler(), plan_of([A, B])
    admission = scheduler.admit("r", plan, policy)
    assert admission.plan is plan
    assert (admission.loads, admission.evictions, admission.reason) == ((), (), None)
    assert scheduler.pinned() == 0
    assert scheduler.step(NoAdvice().advice(9)).promotions == ()


def test_the_policy_full_asks_nothing_of_the_engine():
    plan = DelegatedScheduler().admit("r", plan_of([A, B]), Policy.FULL).plan
    assert (plan.reused, plan.fallback_reasons) == ((), ())


def test_a_request_is_admitted_once_until_it_is_released():
    scheduler = DelegatedScheduler()
    scheduler.admit("r", plan_of([A]), Policy.BLEND)
    with pytest.raises(BlendError, match="admitted before"):
        scheduler.admit("r", plan_of([A]), Policy.BLEND)
    scheduler.release("r")
    scheduler.release("nobody")
    scheduler.admit("r", plan_of([A]), Policy.BLEND)


def serve(runner: FakeRunner, requests: list[EngineRequest]) -> list[FinishReason]:
    engine = make_engine(runner, ChunkStore(None, 0))
    for request in requests:
        engine.submit(request)
    outcomes = []
    while engine.has_work:
        outcomes.extend(engine.step().finished)
    engine.close()
    return [outcome.finish_reason for outcome in outcomes]


def test_a_runner_that_schedules_for_itself_gets_chunks_that_no_store_knows_and_the_policy():
    runner = FakeRunner(schedules_kv=True)
    once = SamplingParams(max_tokens=1)
    requests = [EngineRequest(policy.value, plan_of([A, B]), policy, once) for policy in Policy]
    assert serve(runner, requests) == [FinishReason.LENGTH] * 3
    assert {name: plan.reused_tokens > 0 for name, plan in runner.plans.items()} == {
        "full": False, "blend": True, "auto": True,
    }  # fmt: skip
    assert runner.policies == {policy.value: policy for policy in Policy}


def test_any_other_runner_gets_only_chunks_that_the_store_has():
    runner = FakeRunner()
    serve(runner, [EngineRequest("r", plan_of([A, B]), Policy.BLEND, SamplingParams(max_tokens=1))])
    assert runner.plans["r"].fallback_reasons == ("missing", "missing")


def test_all_requests_are_handed_to_a_runner_that_queues_for_itself():
    runner = FakeRunner(schedules_kv=True)
    engine = make_engine(runner, ChunkStore(None, 0))
    for number in range(40):
        engine.submit(EngineRequest(str(number), plan_of([A]), Policy.BLEND, SamplingParams(max_tokens=9)))
    engine.step()
    assert len(runner.live) == 40
    engine.close()
