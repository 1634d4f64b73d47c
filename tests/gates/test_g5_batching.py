"""G5: a request blended in a batch gives what it gives alone, and twice in a row gives the same."""

from dataclasses import replace

import pytest

from cacheblend.plan import full_prefill_plan
from cacheblend.sampling_params import SamplingParams
from cacheblend.selectors import make_selector
from cacheblend.selectors.deviation import DeviationSelector


@pytest.fixture
def plans(bench):
    """Plain and blended prompts of every kind, sharing chunks in other orders."""
    chunks = [bench.collect(bench.ids(n, n), bench.ids(6, 1)) for n in (120, 40, 75)]
    question, system = bench.ids(10, 3), bench.ids(20, 4)
    return [
        bench.plan(chunks, question, make_selector("query", 0.2), system),
        full_prefill_plan(bench.ids(90, 5)),
        bench.plan(chunks[::-1], bench.ids(7, 6), make_selector("deviation", 0.2), system),
        bench.plan(chunks[1:], question, DeviationSelector(0.2, (1, 3))),
        bench.plan([chunks[0], bench.ids(30, 7), chunks[1]], question, make_selector("chunk_head"), system),
        bench.plan([chunks[2], chunks[2]], question, make_selector("none")),
        bench.plan(chunks, question, make_selector("chunk_head+query", 0.3), system),
        full_prefill_plan(bench.ids(3, 8)),
        replace(bench.plan(chunks, bench.ids(8, 9), make_selector("query", 0.2), system), carry_drift=True),
        replace(bench.plan(chunks[::-1], question, make_selector("deviation", 0.3), system), carry_drift=True),
    ]


def test_g5_together_and_alone_and_twice_give_the_same_tokens(bench, plans):
    alone = [bench.tokens([plan])[0] for plan in plans]
    together = bench.tokens(plans)
    assert together == alone
    assert bench.tokens(plans[::-1]) == alone[::-1]
    assert bench.tokens(plans) == together


def test_g5_together_and_alone_recompute_the_same_rows(bench, plans):
    runner = bench.runner
    alone = [runner.score(plan)[1].rows for plan in plans]
    ids = [runner.prefill(plan, SamplingParams(max_tokens=1)) for plan in plans]
    runner.step()
    together = [runner.report(i).rows for i in ids]
    for i in ids:
        runner.release(i)
    assert together == alone
    assert any(alone)


def test_g5_a_request_that_joins_while_others_decode_changes_nothing(llama):
    runner = llama.runner
    first = full_prefill_plan(llama.ids(50, 1))
    chunk = llama.collect(llama.ids(60, 2))
    second = llama.plan([chunk], llama.ids(8, 3), make_selector("query", 0.2))
    alone = [llama.tokens([plan], 6)[0] for plan in (first, second)]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    got: dict[str, list[int]] = {"a": [], "b": []}
    runner.prefill(first, sampling, "a")
    for step in range(8):
        if step == 2:
            runner.prefill(second, sampling, "b")
        for sequence, tokens in runner.step().tokens.items():
            got[sequence].extend(tokens)
    runner.release("a")
    runner.release("b")
    assert [got["a"], got["b"]] == alone


def test_g5_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(llama):
    runner = llama.runner
    plans = [full_prefill_plan(llama.ids(20, seed)) for seed in (1, 2, 3)]

    def draw(chosen, seed):
        ids = [
            runner.prefill(plan, SamplingParams(max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True))
            for plan in chosen
        ]
        out = {i: [] for i in ids}
        for _ in range(6):
            for i, tokens in runner.step().tokens.items():
                out[i].extend(tokens)
        for i in ids:
            runner.release(i)
        return [out[i] for i in ids]

    together = draw(plans, 7)
    assert [draw([plan], 7)[0] for plan in plans] == together
    assert draw(plans, 8) != together
