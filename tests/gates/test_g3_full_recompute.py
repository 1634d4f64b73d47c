"""G3: any selector at ratio 1.0 gives full prefill's logits and greedy tokens."""

import pytest

from cacheblend.selectors import make_selector
from cacheblend.selectors.deviation import DeviationSelector

TOLERANCE = 1e-4
SELECTORS = {
    "full": make_selector("full"),
    "chunk_head": make_selector("chunk_head", 1.0),
    "deviation": make_selector("deviation", 1.0),
    "deviation-gradual": DeviationSelector(1.0, check_layers=(1, 2, 3)),
    "query": make_selector("query", 1.0),
    "chunk_head+query": make_selector("chunk_head+query", 1.0),
    "chunk_head+deviation": make_selector("chunk_head+deviation", 1.0),
    # Shares that round to every row, which are chosen by evidence all the same.
    "deviation-rounded": make_selector("deviation", 0.999),
    "query-rounded": make_selector("query", 0.999),
}


@pytest.fixture
def chunks(bench):
    """Three chunks of different lengths, encoded behind another prefix than the one they are used behind."""
    return [bench.collect(bench.ids(n, n), bench.ids(6, 1)) for n in (140, 33, 200)]


@pytest.mark.parametrize("name", SELECTORS)
def test_g3_a_selector_at_ratio_one_equals_full_prefill(bench, chunks, max_error, name):
    plan = bench.plan([chunks[2], chunks[0], chunks[1]], bench.ids(10, 3), SELECTORS[name], system=bench.ids(20, 4))
    assert max_error(bench.logits(plan), bench.full(plan.token_ids)) <= TOLERANCE
    assert bench.tokens([plan]) == [bench.oracle_tokens(plan.token_ids)]
    report = bench.runner.score(plan)[1]
    assert report.recomputed_tokens == report.reused_tokens == 373
    assert report.recomputed_ratio == 1.0


@pytest.mark.parametrize("name", SELECTORS)
def test_g3_fresh_chunks_between_reused_ones_are_exact_too(bench, chunks, max_error, name):
    plan = bench.plan([chunks[0], bench.ids(60, 9), chunks[1]], bench.ids(10, 3), SELECTORS[name])
    assert max_error(bench.logits(plan), bench.full(plan.token_ids)) <= TOLERANCE


def test_g3_half_a_recompute_is_told_from_full_prefill(bench, chunks, max_error):
    plan = bench.plan(chunks, bench.ids(10, 3), make_selector("query", 0.1), system=bench.ids(20, 4))
    assert max_error(bench.logits(plan), bench.full(plan.token_ids)) > 1e-2


def test_g3_a_budget_of_no_rows_at_several_check_layers_is_plain_reuse(bench, chunks, max_error):
    question = bench.ids(10, 3)
    nothing = bench.plan(chunks, question, DeviationSelector(0.0, check_layers=(1, 2)))
    reuse = bench.plan(chunks, question, make_selector("none"))
    assert bench.runner.score(nothing)[1].rows == ()
    # Layer 0, which is computed for all rows, has the stored KV anyway: there it depends on token and position only.
    assert max_error(bench.logits(nothing), bench.logits(reuse)) <= TOLERANCE
    assert max_error(bench.logits(nothing), bench.full(nothing.token_ids)) > 1e-3
