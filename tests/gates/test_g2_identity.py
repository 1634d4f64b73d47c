"""G2: a chunk reused where it was encoded, behind the same prefix, gives full prefill's logits."""

import pytest

from cacheblend.selectors import make_selector

TOLERANCE = 1e-4


@pytest.mark.parametrize("prefix_length", [0, 1, 24])
def test_g2_a_chunk_reused_at_its_own_place_equals_full_prefill(bench, max_error, prefix_length):
    prefix, chunk, question = bench.ids(prefix_length, 1), bench.ids(150, 2), bench.ids(12, 3)
    stored = bench.collect(chunk, prefix)
    plan = bench.plan([stored], question, make_selector("none"), system=prefix)
    assert max_error(bench.logits(plan), bench.full(plan.token_ids)) <= TOLERANCE
    assert bench.tokens([plan]) == [bench.oracle_tokens(plan.token_ids)]


def test_g2_a_chunk_of_one_token_reused_at_its_own_place_equals_full_prefill(bench, max_error):
    prefix, question = bench.ids(8, 4), bench.ids(5, 5)
    stored = bench.collect(bench.ids(1, 6), prefix)
    plan = bench.plan([stored], question, make_selector("none"), system=prefix)
    assert max_error(bench.logits(plan), bench.full(plan.token_ids)) <= TOLERANCE


def test_g2_plain_reuse_at_another_place_is_told_from_full_prefill(bench, max_error):
    chunks = [bench.collect(bench.ids(100, seed)) for seed in (7, 8)]
    plan = bench.plan(chunks, bench.ids(12, 9), make_selector("none"))
    assert max_error(bench.logits(plan), bench.full(plan.token_ids)) > 1e-2
