"""Causal attention for any rows of a prompt over the keys cached for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

MAX_BLOCK_ROWS = 256
MAX_BLOCK_SPAN = 1024
MASS_BLOCK_ROWS = 128


@dataclass(frozen=True)
class RowBlock:
    """Neighbouring rows that attend together.

    Attributes:
        rows: which of the rows, by their place in order.
        reach: keys that any of them may see: the last one's position plus one.
        visible: [rows, reach] bool, True where a row sees a key; None for a whole prefix, which is plainly causal.
    """

    rows: slice
    reach: int
    visible: torch.Tensor | None


def row_blocks(positions: torch.Tensor) -> list[RowBlock]:
    """Divide rows into blocks that read few keys they do not need.

    Args:
        positions: [n] int64 ascending, distinct, n at least 1.

    Returns:
        Blocks of at most `MAX_BLOCK_ROWS` rows within `MAX_BLOCK_SPAN` positions; or one block for a whole prefix.
    """
    places = positions.tolist()
    if places[-1] == len(places) - 1:
        return [RowBlock(slice(0, len(places)), len(places), None)]
    blocks = []
    first = 0
    for row in range(1, len(places) + 1):
        ends = row == len(places) or row - first == MAX_BLOCK_ROWS or places[row] - places[first] > MAX_BLOCK_SPAN
        if ends:
            reach = places[row - 1] + 1
            visible = torch.arange(reach, device=positions.device) <= positions[first:row, None]
            blocks.append(RowBlock(slice(first, row), reach, visible))
            first = row
    return blocks


def attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: list[RowBlock], scaling: float
) -> torch.Tensor:
    """Attend from each row to every key at or before its position.

    A block reads keys only up to its last row, so scattered rows cost about what their share of a causal prefill costs.

    Args:
        query: [heads, n, head_dim].
        keys: [kv_heads, m, head_dim]; the key of position p is at index p.
        values: [kv_heads, m, head_dim].
        blocks: the n rows, from `row_blocks`; every reach is at most m.
        scaling: factor on the scores.

    Returns:
        [heads, n, head_dim].
    """
    return torch.cat([_attend_block(query[:, b.rows], keys, values, b, scaling) for b in blocks], dim=1)


def _attend_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: RowBlock, scaling: float
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        query[None],
        keys[None, :, : block.reach],
        values[None, :, : block.reach],
        attn_mask=block.visible,
        is_causal=block.visible is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0]


def attention_mass(query: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention that rows pay to each key, summed over heads and rows.

    Args:
        query: [heads, n, head_dim].
        keys: [kv_heads, m, head_dim], m above the last position.
        positions: [n] int64 ascending.
        scaling: factor on the scores.

    Returns:
        [reach] float32 where reach is the last position plus one.
    """
    reach = int(positions[-1]) + 1
    mass = torch.zeros(reach, dtype=torch.float32, device=query.device)
    # In blocks, so that a long question takes no more memory than a short one.
    for first in range(0, len(positions), MASS_BLOCK_ROWS):
        rows = slice(first, first + MASS_BLOCK_ROWS)
        mass += _block_mass(query[:, rows], keys[:, :reach], positions[rows], scaling)
    return mass


def _block_mass(query: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, scaling: float) -> torch.Tensor:
    heads, n, dim = query.shape
    reach = keys.shape[1]
    folded = query.reshape(keys.shape[0], -1, dim)
    scores = torch.matmul(folded * scaling, keys.transpose(1, 2)).float().view(heads, n, reach)
    hidden = torch.arange(reach, device=positions.device) > positions[:, None]
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1).sum((0, 1))
