"""Rows that are left alone move with the recomputed rows of their chunk."""

from __future__ import annotations

import pytest
import torch
from cacheblend_samples import identity_of, plan_of

from cacheblend.drift import chunk_drifts, drift_weights, key_shift
from cacheblend.relocation import rotate_keys, unrotate_keys
from cacheblend.selectors import make_selector


def tables(positions):
    angles = positions[:, None].float() / torch.tensor([1.0, 7.0, 50.0, 300.0])
    angles = torch.cat([angles, angles], 1)
    return angles.cos(), angles.sin()


def test_weights_fall_with_distance_and_leave_a_share_for_no_drift():
    told = torch.tensor([10, 12])
    weights = drift_weights(torch.tensor([11, 30, 500]), told)
    assert weights.shape == (3, 2)
    assert torch.all(weights.sum(1)[:-1] > weights.sum(1)[1:]), "the farther from what is told, the less it moves"
    assert weights[0].sum() < 1.0
    assert weights[2].sum() < 1e-6, "far from what is told nothing moves"


def test_a_row_moves_by_the_weighted_drift_of_its_chunks_recomputed_rows_alone():
    plan = plan_of([identity_of(1, 20), identity_of(2, 12)], make_selector("query", 0.2))
    first, second = plan.reused
    positions = torch.tensor([first.start + 3, first.start + 9, second.start + 1, plan.question.start])
    drifts = chunk_drifts(plan, positions)
    assert [drift.rows for drift in drifts] == [slice(0, 2), slice(2, 3)]
    own = set(range(first.start, first.end)) - set(positions.tolist())
    assert set(drifts[0].left.tolist()) == own
    drift = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([sum(w * d for w, d in zip(row, drift, strict=True)) for row in drifts[0].weights])
    torch.testing.assert_close(drifts[0].shift(drift), expected)


@pytest.mark.parametrize("chosen", ["none", "all"])
def test_a_chunk_of_which_nothing_or_everything_is_recomputed_moves_nothing(chosen):
    plan = plan_of([identity_of(1, 6)], make_selector("query", 0.2))
    (span,) = plan.reused
    positions = torch.arange(span.start, span.end) if chosen == "all" else torch.tensor([plan.question.start])
    assert chunk_drifts(plan, positions) == []


def test_keys_drift_before_rotation_wherever_the_rows_stand():
    plan = plan_of([identity_of(1, 9)], make_selector("query", 0.2))
    (span,) = plan.reused
    positions = torch.tensor([span.start + 2, span.start + 5])
    (drift,) = chunk_drifts(plan, positions)
    plain = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(1)).expand(2, 2, 8)
    difference = rotate_keys(plain, *tables(positions))
    moved = unrotate_keys(key_shift(drift, difference, tables, 1.0), tables, drift.left, 1.0)
    torch.testing.assert_close(moved, drift.weights.sum(1)[:, None, None] * plain[:1], atol=1e-5, rtol=1e-4)
