"""`BlendEngine` over the real scheduler, predictor, prefetcher and store; only the model is a fake."""

from __future__ import annotations

import pytest
from cacheblend_samples import BYTES_PER_TOKEN, identity_of, plan_of, tiny_kv
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.engine import BlendEngine
from cacheblend.plan import Policy
from cacheblend.protocols import Advice, FinishReason, PrefillHints
from cacheblend.request import EngineRequest
from cacheblend.sampling_params import SamplingParams
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.scheduling.session_predictor import SessionPredictor
from cacheblend.selectors import make_selector
from cacheblend.testing import FakePredictor, FakeRunner
from kvstore.errors import ChunkUnavailable, UnavailableReason
from kvstore.store import ChunkStore
from kvstore.tiers import Tier
from kvstore.transfer import ThreadPrefetcher

CHUNKS = [identity_of(seed, tokens) for seed, tokens in enumerate((4, 4, 6, 8, 8), start=1)]
A, B, C, D, E = CHUNKS


class Parts:
    """An engine whose chunks are on disk and nowhere else."""

    def __init__(self, root, budget_tokens=1000, predictor=None, max_running=8):
        writer = ChunkStore(root, 0)
        for chunk in CHUNKS:
            writer.put(tiny_kv(chunk))
        self.root = root
        self.store = ChunkStore(root, budget_tokens * BYTES_PER_TOKEN)
        self.loads = []
        load = self.store.load
        self.store.load = lambda identity: (self.loads.append(identity), load(identity))[1]
        self.scheduler = ChunkScheduler({Tier.HOST: self.store.host_budget_bytes}, self.store.records())
        self.runner = FakeRunner(bytes_per_token=BYTES_PER_TOKEN)
        self.engine = BlendEngine(
            self.runner,
            self.store,
            self.scheduler,
            predictor or SessionPredictor(),
            ThreadPrefetcher(self.store),
            max_running=max_running,
        )

    def submit(self, name, plan, count=2, **settings):
        self.engine.submit(EngineRequest(name, plan, sampling=SamplingParams(max_tokens=count), **settings))

    def run(self):
        outcomes = {}
        while self.engine.has_work:
            assert self.store.host_bytes_used <= self.store.host_budget_bytes
            outcomes.update({outcome.request_id: outcome for outcome in self.engine.step().finished})
        return outcomes

    def close(self):
        self.engine.close()
        assert self.store.pinned_count() == 0
        assert self.scheduler.pinned() == 0
        assert self.runner.live == set()
        assert self.engine._prefetcher.in_flight() == 0


@pytest.fixture
def parts(tmp_path):
    parts = Parts(tmp_path)
    yield parts
    parts.close()


def file_of(root, chunk):
    return next(root.rglob(f"{chunk.key}*.safetensors"))


def test_chunks_come_from_disk_once_and_from_the_host_afterwards(parts):
    parts.submit("cold", plan_of([A, B]))
    assert parts.run()["cold"].report.bytes_loaded == {"disk": 8 * BYTES_PER_TOKEN}
    parts.submit("warm", plan_of([B, A, B]))
    assert parts.run()["warm"].report.bytes_loaded == {"host": 12 * BYTES_PER_TOKEN}
    assert parts.loads == [A, B]


def test_a_damaged_file_makes_that_chunk_fresh_for_all_who_wait_and_it_is_missing_afterwards(parts, tmp_path):
    path = file_of(tmp_path, B)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    parts.submit("1", plan_of([A, B]))
    parts.submit("2", plan_of([B, C]))
    outcomes = parts.run()
    assert [outcomes[name].report.fallback_reasons for name in "12"] == [("checksum",), ("checksum",)]
    assert parts.runner.plans["1"].keys == (A.key,)
    assert parts.runner.plans["2"].keys == (C.key,)
    parts.submit("3", plan_of([A, B]))
    assert parts.run()["3"].report.fallback_reasons == ("missing",)
    assert parts.scheduler.used_bytes(Tier.HOST) == parts.store.host_bytes_used


def test_a_read_error_that_passes_makes_a_chunk_fresh_once_and_not_for_ever(parts):
    load = parts.store.load

    def fail(identity):
        raise ChunkUnavailable(identity.key, UnavailableReason.UNREADABLE, "input/output error")

    parts.store.load = fail
    parts.submit("1", plan_of([A]))
    assert parts.run()["1"].report.fallback_reasons == ("unreadable",)
    parts.store.load = load
    parts.submit("2", plan_of([A]))
    assert parts.run()["2"].report.fallback_reasons == ()
    assert parts.scheduler.used_bytes(Tier.HOST) == parts.store.host_bytes_used


def test_a_file_that_vanished_makes_that_chunk_fresh(parts, tmp_path):
    file_of(tmp_path, B).unlink()
    parts.submit("q", plan_of([A, B]))
    outcome = parts.run()["q"]
    assert parts.runner.plans["q"].keys == (A.key,)
    assert outcome.report.fallback_reasons == ("evicted",)


def test_a_request_that_recomputes_everything_loads_nothing_and_lacks_nothing(parts, tmp_path):
    file_of(tmp_path, B).unlink()
    plan = plan_of([A, B], make_selector("full"))
    parts.submit("q", plan)
    outcome = parts.run()["q"]
    assert (parts.runner.plans["q"], outcome.report.fallback_reasons) == (plan, ())
    assert parts.loads == []


def test_a_chunk_wanted_by_many_requests_at_once_is_loaded_once(parts):
    for i in range(6):
        parts.submit(str(i), plan_of([A, B], question=(i + 1,)))
    assert len(parts.run()) == 6
    assert parts.loads == [A, B]


@pytest.mark.parametrize("budget", [0, 3, 4, 9])
def test_a_store_smaller_than_one_request_serves_it_whole_and_keeps_its_budget(tmp_path, budget):
    parts = Parts(tmp_path, budget)
    plan = plan_of(CHUNKS)
    parts.submit("1", plan)
    parts.submit("2", plan_of(CHUNKS[::-1]))
    outcomes = parts.run()
    assert parts.runner.plans["1"] == plan
    assert [outcomes[name].report.fallback_reasons for name in "12"] == [(), ()]
    parts.close()


def test_what_is_advised_is_on_the_host_when_it_is_asked_for(tmp_path):
    parts = Parts(tmp_path, max_running=1)
    parts.submit("1", plan_of([A]), count=3)
    parts.submit("2", plan_of([B]))
    parts.engine.step()
    parts.engine._prefetcher.wait([B.key], 30)
    assert parts.store.lookup(B) is Tier.HOST
    assert parts.run()["2"].token_ids == tuple(FakeRunner.token(plan_of([B]), i) for i in range(2))
    assert parts.loads == [A, B]
    parts.close()


class Dead(FakePredictor):
    """Raises at everything, as a predictor whose process is gone would."""

    def __init__(self, from_call):
        super().__init__()
        self.calls, self.from_call = 0, from_call

    def _die(self):
        self.calls += 1
        if self.calls >= self.from_call:
            raise BrokenPipeError("the predictor's process is gone")

    def observe(self, event):
        self._die()

    def advice(self, limit):
        self._die()
        return []


STRANGER = identity_of(99, model="another")


@pytest.mark.parametrize(
    "predictor",
    [
        FakePredictor(),
        FakePredictor([Advice(STRANGER, 9.0), Advice(STRANGER, -1.0), Advice(STRANGER, float("nan"))]),
        FakePredictor([Advice(chunk, 1.0) for chunk in CHUNKS[::-1]]),
        FakePredictor([Advice(E, 1.0)] * 40),
        Dead(1),
        Dead(2),
        Dead(9),
    ],
    ids=["frozen", "strangers", "everything backwards", "one thing over and over", "dead", "dies", "dies at advice"],
)
@pytest.mark.parametrize("budget", [0, 8, 14, 1000])
def test_no_predictor_however_wrong_changes_a_token_or_a_reason(tmp_path, predictor, budget):
    parts = Parts(tmp_path, budget, predictor, max_running=2)
    plans = {"1": plan_of([A, B]), "2": plan_of([C, D, A]), "3": plan_of([E]), "4": plan_of([STRANGER, B])}
    for name, plan in plans.items():
        parts.submit(name, plan, hints=PrefillHints(candidates=(E, D)))
    outcomes = parts.run()
    expected = {**plans, "4": plans["4"].with_fresh({STRANGER.key: "missing"})}
    for name, plan in expected.items():
        assert outcomes[name].token_ids == tuple(FakeRunner.token(plan, i) for i in range(2))
        assert outcomes[name].report.fallback_reasons == plan.fallback_reasons
    parts.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("chunks")


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.lists(st.sampled_from(CHUNKS), max_size=4),
            st.sampled_from(list(Policy)),
            st.integers(1, 4),
        ),
        st.tuples(st.just("abort"), st.integers(0, 8)),
        st.tuples(st.just("step"), st.integers(1, 3)),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, budget=st.sampled_from([0, 4, 9, 14, 1000]), max_running=st.integers(1, 3))
def test_whatever_comes_and_goes_each_request_ends_once_and_nothing_is_left(root, actions, budget, max_running):
    parts = Parts(root, budget, max_running=max_running)
    plans, ended, aborted = {}, {}, set()

    def step():
        for outcome in parts.engine.step().finished:
            assert outcome.request_id not in ended
            ended[outcome.request_id] = outcome
        assert parts.store.host_bytes_used <= parts.store.host_budget_bytes

    for kind, *details in actions:
        if kind == "submit":
            chunks, policy, count = details
            name = str(len(plans))
            plan = plan_of(chunks)
            parts.submit(name, plan, count, policy=policy)
            # All chunks are published, and plain reuse computes too few rows for `auto` to prefill instead.
            plans[name] = (plan.as_full() if policy is Policy.FULL else plan, count)
        elif kind == "abort":
            parts.engine.abort(str(details[0]))
            aborted.add(str(details[0]))
        else:
            for _ in range(details[0]):
                step()
    while parts.engine.has_work:
        step()
    assert set(ended) == set(plans)
    for name, outcome in ended.items():
        plan, count = plans[name]
        tokens = tuple(FakeRunner.token(plan, i) for i in range(count))
        if outcome.finish_reason is FinishReason.ABORT:
            assert name in aborted
            assert outcome.token_ids == tokens[: len(outcome.token_ids)]
        else:
            assert outcome.token_ids == tokens
        assert outcome.report.fallback_reasons == ()
    parts.close()
