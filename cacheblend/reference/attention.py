"""Causal attention for any rows of a prompt over the keys cached for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS_PER_BLOCK = 128


def attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attend from each row to every key at or before its position.

    Rows are taken in blocks that read keys only up to the block's last position, so scattered rows cost what
    their share of a causal prefill costs. Rows that are a whole prefix use the stock causal kernel.

    Args:
        query: [heads, n, head_dim].
        keys: [kv_heads, m, head_dim]; the key of position p is at index p.
        values: [kv_heads, m, head_dim].
        positions: [n] int64 ascending, all below m.
        scaling: factor on the scores.

    Returns:
        [heads, n, head_dim].
    """
    heads, n, _ = query.shape
    group = heads // keys.shape[0]
    if int(positions[-1]) == n - 1:
        wide_keys, wide_values = (t[:, :n].repeat_interleave(group, 0)[None] for t in (keys, values))
        out = F.scaled_dot_product_attention(query[None], wide_keys, wide_values, is_causal=True, scale=scaling)
        return out[0]
    blocks = [
        _attend_block(query[:, i : i + ROWS_PER_BLOCK], keys, values, positions[i : i + ROWS_PER_BLOCK], scaling)
        for i in range(0, n, ROWS_PER_BLOCK)
    ]
    return torch.cat(blocks, dim=1)


def _attend_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, scaling: float
) -> torch.Tensor:
    heads, n, dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    reach = int(positions[-1]) + 1
    mask = None
    if n > 1:
        visible = torch.arange(reach, device=positions.device) <= positions[:, None]
        mask = visible.repeat(group, 1)
    # Heads that share a key head become rows of one matrix: each key is read once for the whole group.
    folded = query.reshape(1, kv_heads, group * n, dim)
    out = F.scaled_dot_product_attention(
        folded, keys[None, :, :reach], values[None, :, :reach], attn_mask=mask, scale=scaling
    )
    return out.reshape(heads, n, dim)


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
    heads, n, dim = query.shape
    reach = int(positions[-1]) + 1
    folded = query.reshape(keys.shape[0], -1, dim)
    scores = torch.matmul(folded * scaling, keys[:, :reach].transpose(1, 2)).float().view(heads, n, reach)
    hidden = torch.arange(reach, device=positions.device) > positions[:, None]
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1).sum((0, 1))
