"""`VllmRunner` keeps the ModelRunner's promises, and gives what the reference runner gives."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from cacheblend import step_log
from cacheblend.errors import BlendError
from cacheblend.plan import Policy, full_prefill_plan
from cacheblend.protocols import FinishReason, StepOutput
from cacheblend.sampling_params import SamplingParams
from cacheblend.selectors import make_selector
from cacheblend.vllm_backend.prompts import NOT_REPORTED
from kvstore.errors import UnavailableReason
from kvstore.events import NotStored
from kvstore.key import ChunkIdentity

vllm = pytest.importorskip("vllm")

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def run(runner: Any, *names: str) -> tuple[dict[str, list[int]], dict[str, FinishReason], list[StepOutput]]:
    """Step until these sequences have ended: their tokens, their ends, and the steps."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    ends: dict[str, FinishReason] = {}
    steps: list[StepOutput] = []
    while not ends.keys() >= set(names):
        steps.append(runner.step())
        for name, new in steps[-1].tokens.items():
            tokens[name].extend(new)
        ends.update(steps[-1].finished)
    return tokens, ends, steps


def ask(runner: Any, prompt: Any, sampling: Any = GREEDY, policy: Policy = Policy.BLEND):
    """One prompt to its end: tokens, report, and why it ended."""
    name = runner.prefill(prompt, sampling, policy=policy)
    tokens, ends, _ = run(runner, name)
    report = runner.report(name)
    runner.release(name)
    return tokens[name], report, ends[name]


@pytest.fixture(scope="module")
def chunks(runner, prompts):
    """Two chunks that the engine has collected."""
    made = [prompts.ids(150), prompts.ids(123)]
    runner.collect(made, prompts.head)
    return made


def test_both_engines_name_the_model_alike(runner, reference):
    assert runner.fingerprint == reference.runner.fingerprint
    assert runner.kv_bytes_per_token == reference.runner.kv_bytes_per_token
    assert runner.max_model_len == reference.runner.max_model_len


def test_bare_ids_give_the_reference_runners_tokens(runner, reference, prompts):
    ids = prompts.ids(60)
    tokens, report, end = ask(runner, ids)
    assert tokens == ask(reference.runner, ids)[0]
    assert (report.mode, report.fallback_reasons, end) == ("full", (), FinishReason.LENGTH)


@pytest.mark.parametrize("selector", ["none", "chunk_head", "deviation", "query", "chunk_head+query", "full"])
def test_a_plan_gives_the_reference_runners_tokens_rows_and_account(runner, reference, prompts, chunks, selector):
    plan = prompts.plan(chunks[::-1], make_selector(selector))
    reference.store.refresh()
    tokens, report, _ = ask(runner, plan)
    expected, theirs, _ = ask(reference.runner, plan)
    assert tokens == expected
    assert report.rows == theirs.rows
    assert (report.mode, report.selector, report.fallback_reasons) == ("blend", theirs.selector, ())
    assert (report.reused_tokens, report.recomputed_tokens) == (theirs.reused_tokens, theirs.recomputed_tokens)
    assert report.recomputed_ratio == pytest.approx(theirs.recomputed_ratio)


def test_chunks_that_the_reference_runner_collected_are_reused(runner, reference, prompts):
    chunk = prompts.ids(70)
    key = reference.runner.collect([chunk], prompts.head)
    assert runner.collect([chunk], prompts.head) == key
    # The engine looks at the folder once a second.
    deadline = time.monotonic() + 30
    plan = prompts.plan([chunk], make_selector("none"))
    while (report := ask(runner, plan)[1]).fallback_reasons:
        assert time.monotonic() < deadline
    assert report.reused_tokens == 70


def test_a_chunk_is_collected_once_and_given_back_in_order(runner, reference, prompts, chunks):
    new = prompts.ids(40)
    keys = runner.collect([new, chunks[0], new], prompts.head)
    assert keys == [ChunkIdentity(runner.fingerprint, prompts.head, tuple(c)).key for c in (new, chunks[0], new)]
    reference.store.refresh()
    mine, theirs = (ChunkIdentity(runner.fingerprint, prompts.head, c) for c in (new, prompts.ids(40)))
    assert reference.store.lookup(mine) is not None
    assert runner.chunks.lookup(theirs) is None


def test_a_running_sequence_goes_on_while_chunks_are_collected(runner, prompts):
    ids = prompts.ids(30)
    alone = ask(runner, ids)[0]
    name = runner.prefill(ids, GREEDY)
    runner.step()
    before = list(runner.output(name).outputs[0].token_ids)
    runner.collect([prompts.ids(64)], prompts.head)
    tokens, ends, steps = run(runner, name)
    assert len(before) == 1
    assert before + tokens[name] == alone
    assert ends[name] is FinishReason.LENGTH
    assert all(len(new) == 1 for step in steps for new in step.tokens.values())
    runner.release(name)


def test_what_the_disk_does_not_take_is_told(runner, prompts):
    told: list[Any] = []
    identity = ChunkIdentity(runner.fingerprint, prompts.head, prompts.ids(9))
    stop = runner.chunks.subscribe(told.append)
    runner.chunks.take(identity, {"key": identity.key, "on_disk": False, "on_host": True, "reason": "disk_full"})
    stop()
    runner.chunks.take(identity, {"key": identity.key, "on_disk": False, "on_host": False, "reason": None})
    assert told == [NotStored(identity.key, UnavailableReason.DISK_FULL)]
    assert runner.chunks.lookup(identity) is not None
    runner.chunks.refresh()
    assert runner.chunks.lookup(identity) is None


def test_a_missing_chunk_is_fresh_and_the_report_says_so(runner, prompts, chunks):
    missing = prompts.ids(50)
    plan = prompts.plan([chunks[0], missing, chunks[1]], make_selector("full"))
    tokens, report, _ = ask(runner, plan)
    assert report.fallback_reasons == ("missing",)
    assert report.reused_tokens == 150 + 123
    assert tokens == ask(runner, plan.token_ids)[0]


def test_segments_that_come_fresh_keep_their_reasons(runner, prompts, chunks):
    plan = prompts.plan(chunks, make_selector("none"))
    fresh = plan.with_fresh({plan.keys[1]: "checksum"})
    report = ask(runner, fresh)[1]
    assert (report.mode, report.reused_tokens, report.fallback_reasons) == ("blend", 150, ("checksum",))
    all_fresh = plan.with_fresh(dict.fromkeys(plan.keys, "checksum"))
    report = ask(runner, all_fresh)[1]
    assert (report.mode, report.fallback_reasons) == ("full", ("checksum", "checksum"))


def test_another_models_chunks_are_fresh(runner, prompts, chunks):
    report = ask(runner, prompts.plan(chunks[:1], make_selector("none"), fingerprint="0" * 64))[1]
    assert (report.mode, report.fallback_reasons) == ("full", ("other_model",))


def test_the_policy_travels(runner, prompts, chunks):
    plan = prompts.plan(chunks, make_selector("full"))
    assert ask(runner, plan, policy=Policy.BLEND)[1].mode == "blend"
    auto = ask(runner, plan, policy=Policy.AUTO)[1]
    assert (auto.mode, auto.fallback_reasons[-1:]) == ("full", ("auto_full_cheaper",))
    full = ask(runner, plan, policy=Policy.FULL)[1]
    assert (full.mode, full.fallback_reasons) == ("full", ())


def test_an_idle_step_returns_at_once_with_the_last_id(runner):
    first, second = runner.step(), runner.step()
    assert second.step_id == first.step_id
    assert (second.tokens, second.finished) == ({}, {})


def test_tokens_carry_the_engines_step_ids_each_step_one_token(runner, prompts):
    sequence = runner.prefill(prompts.ids(40), SamplingParams(max_tokens=5, ignore_eos=True))
    seen = []
    while True:
        output = runner.step()
        seen.extend((output.step_id, tokens) for tokens in output.tokens.values())
        if sequence in output.finished:
            break
    runner.release(sequence)
    first = seen[0][0]
    assert first > 0
    assert [step_id for step_id, _ in seen] == list(range(first, first + 5))
    assert all(len(tokens) == 1 for _, tokens in seen)


class Kept(logging.Handler):
    """Keeps what a logger is told."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __enter__(self):
        self._logger.addHandler(self)
        self._level = self._logger.level
        self._logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_):
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def test_residency_and_token_logs_can_be_joined_by_step(runner, prompts):
    chunk = prompts.ids(60)
    with Kept(step_log.RESIDENCY) as residency, Kept(step_log.TOKENS) as tokens:
        (key,) = runner.collect([chunk], prompts.head)
        ask(runner, prompts.plan([chunk], make_selector("none")))
    published = [r.step_id for r in residency.records if r.key == key and r.change == "published"]
    assert {r.tier for r in residency.records if r.key == key} >= {"host"}
    steps = [r.step_id for r in tokens.records]
    assert steps == sorted(steps)
    assert 0 < min(published) < min(steps)


def test_an_abort_is_reported_once_and_the_others_go_on(runner, prompts):
    ids, others = prompts.ids(40), prompts.ids(50)
    alone = ask(runner, others)[0]
    gone, stays = runner.prefill(ids, SamplingParams(max_tokens=500, ignore_eos=True)), runner.prefill(others, GREEDY)
    steps = [runner.step(), runner.step()]
    runner.abort(gone)
    runner.abort(gone)
    runner.abort("nobody")
    tokens, ends, later = run(runner, stays, gone)
    assert ends[gone] is FinishReason.ABORT
    assert later[0].finished == {gone: FinishReason.ABORT}
    assert not any(gone in step.tokens for step in later)
    before = [token for step in steps for token in step.tokens.get(stays, ())]
    assert before + tokens[stays] == alone
    for name in (gone, stays):
        runner.release(name)
        runner.release(name)
    with pytest.raises(KeyError):
        runner.report(gone)
    assert not runner.engine.has_unfinished_requests()


def test_a_request_that_the_client_ends_has_its_account_all_the_same(runner, prompts, chunks):
    plan = prompts.plan(chunks, make_selector("none"))
    aborted = runner.prefill(plan, SamplingParams(max_tokens=200, ignore_eos=True))
    first = []
    while len(first) < 4:
        first += runner.step().tokens.get(aborted, ())
    runner.abort(aborted)
    runner.step()
    text = runner.engine.tokenizer.decode(first[1:3])
    stopped = runner.prefill(plan, SamplingParams(max_tokens=200, ignore_eos=True, stop=(text,)))
    run(runner, stopped)
    for name in (aborted, stopped):
        report = runner.report(name)
        assert (report.mode, report.fallback_reasons) == ("blend", ())
        assert report.reused_tokens == plan.reused_tokens
        runner.release(name)


def test_a_request_that_asked_for_blending_and_hears_nothing_says_so(runner, prompts, chunks):
    plan = prompts.plan(chunks, make_selector("none"))
    name = runner.prefill(plan, SamplingParams(max_tokens=5, ignore_eos=True))
    assert runner.report(name).fallback_reasons == (NOT_REPORTED,)
    runner.abort(name)
    runner.release(name)


def test_stop_ids_end_ids_and_stop_strings_end_a_sequence_as_on_the_reference_runner(runner, reference, prompts):
    ids = prompts.ids(45)
    tokens = ask(runner, ids, SamplingParams(max_tokens=12, ignore_eos=True))[0]
    text = runner.engine.tokenizer.decode(tokens[4:6])
    for sampling in (
        SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(tokens[3],)),
        SamplingParams(max_tokens=12, ignore_eos=True, stop=(text,)),
        SamplingParams(max_tokens=12),
    ):
        mine, _, end = ask(runner, ids, sampling)
        theirs, _, their_end = ask(reference.runner, ids, sampling)
        assert (mine, end) == (theirs, their_end)
    assert ask(runner, ids, SamplingParams(max_tokens=12, ignore_eos=True, stop=(text,)))[2] is FinishReason.STOP


def test_a_seed_draws_the_same_again(runner, prompts):
    ids = prompts.ids(40)
    hot = [
        SamplingParams(max_tokens=8, temperature=1.5, top_p=0.9, top_k=50, seed=s, ignore_eos=True) for s in (1, 1, 2)
    ]
    first, again, other = (ask(runner, ids, sampling)[0] for sampling in hot)
    assert first == again != other


def test_vllms_own_parameters_give_several_completions_and_their_log_probabilities(runner, prompts, chunks):
    sampling = vllm.SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4, logprobs=2, ignore_eos=True)
    name = runner.prefill(prompts.plan(chunks, make_selector("chunk_head")), sampling)
    tokens, _, _ = run(runner, name)
    output = runner.output(name)
    assert sorted(c.index for c in output.outputs) == [0, 1, 2]
    assert all(len(c.token_ids) == len(c.logprobs) == 4 for c in output.outputs)
    first = next(c for c in output.outputs if c.index == 0)
    assert tokens[name] == list(first.token_ids)
    assert runner.report(name).mode == "blend"
    runner.release(name)
    assert sampling.extra_args is None


def test_bad_prompts_are_refused_in_a_sentence_and_leave_nothing_behind(runner, prompts, chunks):
    runner.prefill(prompts.ids(10), GREEDY, "taken")
    gradual = make_selector("deviation", None, None, (1, 9))
    for prompt, sampling, words in (
        ([], GREEDY, "at least one"),
        (["a"], GREEDY, "tokenise text first"),
        (prompts.ids(2045), GREEDY, "do not fit the model's context of 2048"),
        ([4096], GREEDY, "outside the model's vocabulary of 4096"),
        (prompts.plan(chunks, gradual), GREEDY, "beyond the model's 4 layers"),
        (prompts.ids(3), SamplingParams(temperature=99.0), "vLLM refuses the sampling parameters: temperature"),
        (prompts.ids(3), vllm.SamplingParams(logprobs=4097), "vLLM refuses the prompt"),
    ):
        with pytest.raises(BlendError, match=words) as refused:
            runner.prefill(prompt, sampling, "refused")
        assert "\n" not in str(refused.value)
    with pytest.raises(BlendError, match="'taken' is in use"):
        runner.prefill(prompts.ids(3), GREEDY, "taken")
    assert run(runner, "taken")[1] == {"taken": FinishReason.LENGTH}
    runner.release("taken")
    with pytest.raises(KeyError):
        runner.report("refused")


def test_bad_chunks_are_refused_in_a_sentence(runner, prompts):
    for chunk, words in (
        ((), "has no tokens"),
        (prompts.ids(2046), "does not fit the 2046 that vLLM"),
        ((4096,), "outside the model's vocabulary"),
    ):
        with pytest.raises(BlendError, match=words):
            runner.collect([prompts.ids(5), chunk], prompts.head)


def test_a_prompt_as_long_as_the_context_allows_is_served_and_collected(runner, prompts):
    longest = runner.max_model_len - 2 - len(prompts.head)
    assert len(runner.collect([prompts.ids(longest)], prompts.head)) == 1
    assert len(ask(runner, full_prefill_plan(prompts.ids(2042)))[0]) == 6
