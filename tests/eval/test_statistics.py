"""Intervals, percentiles and divergences against numbers known otherwise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.errors import EvalError
from eval.statistics import (
    DRAWN_AT_ONCE,
    Interval,
    answer_divergence,
    bootstrap_mean,
    kl_divergence,
    paired_bootstrap,
    percentiles,
)


def test_the_bootstrap_interval_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    interval = bootstrap_mean(values)
    half_width = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half_width, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half_width, abs=0.02)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    values = [0.0, 1.0, 0.5, 0.0, 1.0, 0.25]
    assert bootstrap_mean(values, n=500, seed=3) == bootstrap_mean(values, n=500, seed=3)
    wide = np.random.default_rng(0).random(50)
    assert bootstrap_mean(wide, n=500, seed=3) != bootstrap_mean(wide, n=500, seed=4)


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert bootstrap_mean([0.5] * 7, n=100) == Interval(0.5, 0.5, 0.5)
    assert bootstrap_mean([True], n=10) == Interval(1.0, 1.0, 1.0)


def test_many_questions_are_resampled_in_pieces() -> None:
    values = np.zeros(DRAWN_AT_ONCE // 3)
    values[::2] = 1.0
    interval = bootstrap_mean(values, n=7)
    assert 0.499 < interval.low <= interval.high < 0.501


def test_pairing_finds_a_small_difference_that_unpaired_intervals_hide() -> None:
    questions = np.random.default_rng(5).random(200)
    better = questions + 0.02
    difference = paired_bootstrap(better, questions, n=2000)
    assert difference.mean == pytest.approx(0.02)
    assert difference.low > 0
    assert bootstrap_mean(better, n=2000).low < bootstrap_mean(questions, n=2000).high


def test_pairs_stay_pairs() -> None:
    a, b = [1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]
    assert paired_bootstrap(a, b, n=4000).mean == 0.0
    assert paired_bootstrap(a, a, n=100) == Interval(0.0, 0.0, 0.0)
    assert paired_bootstrap(a, b, n=4000).low == -1.0


def test_percentiles_interpolate() -> None:
    found = percentiles(range(1, 102))
    assert (found.p50, found.p95) == (51.0, 96.0)
    assert percentiles([7.0]).p95 == 7.0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([], "at least one number"),
        ([[1.0], [2.0]], "at least one number"),
        ([1.0, math.nan], "number 1 is nan"),
        ([math.inf], "number 0 is inf"),
    ],
)
def test_numbers_that_say_nothing_are_refused(values, complaint: str) -> None:
    for statistic in (bootstrap_mean, percentiles):
        with pytest.raises(EvalError, match=complaint):
            statistic(values)


def test_pairs_of_other_questions_are_refused() -> None:
    with pytest.raises(EvalError, match="same questions, not 2 and 3"):
        paired_bootstrap([1, 2], [1, 2, 3])


def test_kl_of_a_case_worked_by_hand() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    # 0.5 ln 2 - 0.25 ln 2
    assert kl_divergence(np.log(p), np.log(q)) == pytest.approx(0.25 * math.log(2))


def test_kl_of_tensors_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 1000, generator=generator, dtype=torch.float32)
    log_p, log_q = torch.log_softmax(logits, dim=-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(kl_divergence(log_p, log_q), expected, atol=1e-5)
    divergence = answer_divergence(log_p, log_q)
    assert divergence.first == pytest.approx(float(expected[0]), abs=1e-5)
    assert divergence.answer == pytest.approx(float(expected.mean()), abs=1e-5)


def test_kl_keeps_its_direction() -> None:
    p, q = np.log([0.9, 0.1]), np.log([0.5, 0.5])
    assert kl_divergence(p, q) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert kl_divergence(q, p) == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5))


def test_a_token_of_no_probability_costs_nothing_and_one_ruled_out_costs_everything() -> None:
    certain, even = np.array([0.0, -math.inf]), np.log([0.5, 0.5])
    assert kl_divergence(certain, even) == pytest.approx(math.log(2))
    assert kl_divergence(certain, certain) == 0.0
    assert kl_divergence(even, certain) == math.inf


@pytest.mark.parametrize("values", [np.zeros(8), np.array([2.0, 1.0]), np.full(3, np.nan), np.full(3, -np.inf)])
def test_what_is_not_a_distribution_is_refused(values) -> None:
    with pytest.raises(EvalError, match="must sum to 1 over the vocabulary"):
        kl_divergence(values, values)


def test_distributions_of_other_shapes_are_refused() -> None:
    with pytest.raises(EvalError, match="one shape"):
        kl_divergence(np.log([0.5, 0.5]), np.log([1.0]))
    with pytest.raises(EvalError, match="answer tokens, vocabulary"):
        answer_divergence(np.log([0.5, 0.5]), np.log([0.5, 0.5]))
    with pytest.raises(EvalError, match="answer tokens, vocabulary"):
        answer_divergence(np.zeros((0, 4)), np.zeros((0, 4)))


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 30.0))
def test_kl_is_never_negative_and_0_only_for_equals(seed: int, scale: float) -> None:
    logits = np.random.default_rng(seed).normal(0, scale, size=(2, 50))
    log_p, log_q = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    assert kl_divergence(log_p, log_q) > 0
    assert kl_divergence(log_p, log_p) == 0
