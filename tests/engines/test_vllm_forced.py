"""vLLM's distributions along a forced answer are the reference runner's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.selectors import make_selector

vllm = pytest.importorskip("vllm")

from vllm.logprobs import FlatLogprobs  # noqa: E402

from cacheblend.vllm_backend.forced import account_of, forced_request, keep_arrays, log_probabilities  # noqa: E402

VOCABULARY = 4096
TOLERANCE = 1e-4


def outputs_of(runner: Any, requests: list[tuple[Any, Any]], arrays: bool = True) -> list[Any]:
    """All requests together, to their ends."""
    names = []
    for request in requests:
        names.append(runner.prefill(*request))
        if arrays:
            keep_arrays(runner.engine, names[-1])
    ended: set[str] = set()
    while not ended >= set(names):
        ended |= runner.step().finished.keys()
    outputs = [runner.output(name) for name in names]
    for name in names:
        runner.release(name)
    return outputs


@pytest.fixture(scope="module")
def chunks(runner, reference, prompts):
    """Three chunks that both runners have."""
    made = [prompts.ids(90), prompts.ids(64), prompts.ids(77)]
    runner.collect(made, prompts.head)
    reference.store.refresh()
    return made


@pytest.fixture(scope="module")
def answer(prompts):
    return prompts.ids(4)


@pytest.mark.parametrize("selector", ["none", "chunk_head", "deviation", "query", "chunk_head+query", "full"])
def test_a_forced_answer_is_predicted_as_by_the_reference_runner(runner, reference, prompts, chunks, answer, selector):
    plan = prompts.plan(chunks, make_selector(selector, 0.2 if selector in ("deviation", "query") else None))
    expected, report = reference.runner.score(plan, answer[:-1])
    requests = [forced_request(plan, Policy.BLEND, runner.fingerprint, answer[:done]) for done in range(len(answer))]
    outputs = outputs_of(runner, requests[::-1])[::-1]
    scored = torch.stack([log_probabilities(output, VOCABULARY) for output in outputs])
    assert (scored - expected).abs().max() < TOLERANCE
    for output in outputs:
        account = account_of(output)
        assert account is not None
        assert (account["mode"], account["fallback_reasons"]) == ("blend", [])
        assert account["recomputed_tokens"] == report.recomputed_tokens


def test_full_prefill_of_a_forced_answer_reads_neither_chunks_nor_cache(runner, reference, prompts, chunks, answer):
    plan = prompts.plan(chunks, make_selector("none"))
    expected, _ = reference.runner.score(plan.as_full(), answer[:2])
    requests = [forced_request(plan, Policy.FULL, runner.fingerprint, answer[:done], True) for done in (0, 1, 2, 2)]
    outputs = [output for request in requests for output in outputs_of(runner, [request])]
    scored = torch.stack([log_probabilities(output, VOCABULARY) for output in outputs[:3]])
    assert (scored - expected).abs().max() < TOLERANCE
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0]
    assert all(account_of(output) is None for output in outputs)


def test_arrays_hold_what_vllm_would_have_made_of_them(runner, prompts, chunks):
    plan = prompts.plan(chunks, make_selector("none"))
    request = forced_request(plan, Policy.BLEND, runner.fingerprint, ())
    ((slow,), (fast,)) = (outputs_of(runner, [request], arrays) for arrays in (False, True))
    assert isinstance(slow.outputs[0].logprobs, FlatLogprobs)
    assert isinstance(fast.outputs[0].logprobs, list)
    slow, fast = (log_probabilities(output, VOCABULARY) for output in (slow, fast))
    assert (slow - fast).abs().max() < TOLERANCE
    assert fast.exp().sum() == pytest.approx(1.0, abs=1e-4)
    keep_arrays(runner.engine, "nobody")


def test_a_part_of_the_distribution_is_refused(runner, prompts):
    sampling = vllm.SamplingParams(max_tokens=1, logprobs=2, flat_logprobs=True, ignore_eos=True)
    for arrays in (False, True):
        (output,) = outputs_of(runner, [(prompts.ids(30), sampling)], arrays)
        with pytest.raises(BlendError, match=f"of [23] of {VOCABULARY} tokens; start the engine with max_logprobs=-1"):
            log_probabilities(output, VOCABULARY)
