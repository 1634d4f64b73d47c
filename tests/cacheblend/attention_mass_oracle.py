"""Attention of a question over its whole prompt, with what it pays to each key: output and scores in one pass."""

from __future__ import annotations

import torch

MAX_SCORE_BYTES = 256 * 2**20


def hidden_keys(positions: torch.Tensor, n: int) -> torch.Tensor:
    """What each row may not see, made once for all layers.

    Args:
        positions: [rows] integer.
        n: keys, at positions 0 to n - 1.

    Returns:
        [rows, n] float32, minus infinity where a key lies behind the row, else 0.
    """
    places = torch.arange(n, device=positions.device)
    hidden = torch.zeros(len(positions), n, device=positions.device)
    return hidden.masked_fill_(places > positions[:, None], -torch.inf)


def attention_with_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally by position, and sum the attention that each key receives.

    Scores and softmax are float32; at most `MAX_SCORE_BYTES` of scores exist at a time.

    Args:
        query: [rows, heads, head_dim], the rows whose attention counts.
        keys: [n, kv_heads, head_dim] of the query's dtype; the key of position p is at index p. All must be finite.
        values: as `keys`.
        positions: [rows] integer, each below n.
        scale: factor on the scores.
        hidden: `hidden_keys` of these positions, where it is known already.

    Returns:
        The output, [rows, heads, head_dim] of the query's dtype, and the mass, [n] float32: the softmax weights of a
        key summed over heads and rows, rows * heads in all.
    """
    rows, heads, dim = query.shape
    n, kv_heads, _ = keys.shape
    group = heads // kv_heads
    rows_at_a_time = max(1, min(rows, MAX_SCORE_BYTES // (4 * group * n)))
    kv_at_a_time = max(1, min(kv_heads, MAX_SCORE_BYTES // (4 * group * n * rows_at_a_time)))
    out = torch.empty(rows, kv_heads, group, dim, dtype=query.dtype, device=query.device)
    mass = torch.zeros(n, dtype=torch.float32, device=query.device)
    grouped = query.view(rows, kv_heads, group, dim)
    for first_row in range(0, rows, rows_at_a_time):
        at = slice(first_row, first_row + rows_at_a_time)
        unseen = hidden_keys(positions[at], n) if hidden is None else hidden[at]
        for first_head in range(0, kv_heads, kv_at_a_time):
            of = slice(first_head, first_head + kv_at_a_time)
            weights = _weights(grouped[at, of].permute(1, 2, 0, 3), keys[:, of].permute(1, 2, 0), unseen, scale)
            mass += weights.sum((0, 1, 2))
            attended = weights.to(values.dtype).flatten(1, 2) @ values[:, of].transpose(0, 1)
            out[at, of] = attended.view(*weights.shape[:3], dim).permute(2, 0, 1, 3)
    return out.view(rows, heads, dim), mass


def _weights(query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax weights, [kv_heads, group, rows, n] float32.

    Args:
        query: [kv_heads, group, rows, head_dim].
        keys: [kv_heads, head_dim, n].
        hidden: [rows, n] float32, minus infinity where a row may not see a key, else 0.
        scale: factor on the scores.
    """
    scores = _product(query.flatten(1, 2), keys).view(*query.shape[:3], -1)
    return torch.add(hidden, scores, alpha=scale, out=scores).softmax(-1)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched matrix product in float32, without rounding the sums to the operands' dtype."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
