"""Attention of a question with its tally in plain PyTorch: what the kernels must equal, and what runs without a GPU."""

from __future__ import annotations

import torch

from cacheblend.kernels.pages import PagedLayer

BLOCK_ROWS = 128


def score_attention_torch(
    query: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    layer: PagedLayer,
    block_table: torch.Tensor,
    scale: float,
    mass: torch.Tensor,
) -> torch.Tensor:
    """Attend with scores and softmax in float32, and add the weights on the context to `mass`.

    Args:
        query: [rows, heads, head_dim], the last rows of the question.
        own_keys: [own, kv_heads, head_dim].
        own_values: as `own_keys`.
        layer: paged keys and values.
        block_table: [max_blocks] int32.
        scale: factor on the scores.
        mass: [kv_heads, context] float32, added to in place.

    Returns:
        [rows, heads, head_dim] of the query's dtype.
    """
    context, (rows, heads, dim) = mass.shape[1], query.shape
    paged = layer.gather(block_table, context)
    # [kv_heads, 1, context + own, head_dim]: the query heads of a kv head share it.
    keys, values = (
        torch.cat([of_pages, own]).float().transpose(0, 1)[:, None]
        for of_pages, own in zip(paged, (own_keys, own_values), strict=True)
    )
    grouped = query.float().view(rows, len(keys), -1, dim).permute(1, 2, 0, 3)
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    places = torch.arange(keys.shape[2], device=query.device)
    positions = places[len(places) - rows :]
    # In blocks, so that the scores of many rows need no more memory than those of a few.
    for first in range(0, rows, BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        scores = grouped[:, :, block] @ keys.transpose(2, 3) * scale
        weights = scores.masked_fill_(places > positions[block, None], -torch.inf).softmax(-1)
        mass += weights[..., :context].sum((1, 2))
        out[block] = (weights @ values).permute(2, 0, 1, 3).flatten(1, 2)
    return out
