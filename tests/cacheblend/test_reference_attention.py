"""Attention of any rows, against a dense softmax over a mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.reference.attention import (
    MAX_BLOCK_ROWS,
    MAX_BLOCK_SPAN,
    attend_rows,
    attention_mass,
    row_blocks,
)


def dense(query, keys, positions, scaling):
    """[heads, n, m] softmax weights, by the definition."""
    wide = keys.repeat_interleave(query.shape[0] // keys.shape[0], 0)
    scores = query @ wide.transpose(1, 2) * scaling
    hidden = torch.arange(keys.shape[1]) > positions[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def tensors(n, m, heads=6, kv_heads=2, dim=8):
    generator = torch.Generator().manual_seed(n * 7919 + m)
    shapes = ((heads, n, dim), (kv_heads, m, dim), (kv_heads, m, dim))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.frozensets(st.integers(0, 2999), min_size=1, max_size=60),
        st.tuples(st.integers(0, 400), st.integers(1, 700)).map(lambda r: frozenset(range(r[0], sum(r)))),
    )
)
def test_any_rows_attend_as_a_dense_softmax_over_the_keys_up_to_them(rows):
    positions = torch.tensor(sorted(rows))
    query, keys, values = tensors(len(rows), max(rows) + 5)
    keys[:, max(rows) + 1 :] = torch.nan
    values[:, max(rows) + 1 :] = torch.nan
    got = attend_rows(query, keys, values, row_blocks(positions), 0.3)
    m = max(rows) + 1
    wide = values[:, :m].repeat_interleave(3, 0)
    assert torch.allclose(got, dense(query, keys[:, :m], positions, 0.3) @ wide, atol=1e-5)
    mass = attention_mass(query, keys, positions, 0.3)
    assert torch.allclose(mass, dense(query, keys[:, :m], positions, 0.3).sum((0, 1)), atol=1e-4)


@given(st.frozensets(st.integers(0, 9999), min_size=1, max_size=700))
@settings(max_examples=60, deadline=None)
def test_blocks_cover_every_row_once_and_stay_within_their_bounds(rows):
    positions = torch.tensor(sorted(rows))
    blocks = row_blocks(positions)
    assert [i for b in blocks for i in range(b.rows.start, b.rows.stop)] == list(range(len(rows)))
    for block in blocks:
        places = positions[block.rows]
        assert block.reach == int(places[-1]) + 1
        if block.visible is not None:
            assert len(places) <= MAX_BLOCK_ROWS
            assert int(places[-1] - places[0]) <= MAX_BLOCK_SPAN


@pytest.mark.parametrize("n", [1, 2, 700])
def test_a_whole_prefix_is_one_block_of_the_stock_causal_kernel(n):
    (block,) = row_blocks(torch.arange(n))
    assert block.visible is None
    assert block.reach == n
