"""Attention of scattered rows in plain PyTorch: what the kernel must equal, and what runs without a GPU."""

from __future__ import annotations

import torch

from cacheblend.kernels.pages import PagedLayer

BLOCK_ROWS = 128


def attend_rows_torch(
    query: torch.Tensor,
    layer: PagedLayer,
    block_tables: torch.Tensor,
    row_requests: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend from each row to every position of its request up to its own, with scores and softmax in float32.

    Args:
        query: [rows, heads, head_dim], rows sorted by request and position.
        layer: paged keys and values, of the query's dtype.
        block_tables: [requests, max_blocks] int32.
        row_requests: [rows] integer.
        positions: [rows] integer.
        scale: factor on the scores.

    Returns:
        [rows, heads, head_dim] of the query's dtype.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    requests, counts = torch.unique_consecutive(row_requests, return_counts=True)
    first = 0
    for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
        rows = slice(first, first + count)
        first += count
        reach = int(positions[rows][-1]) + 1
        keys, values = (pages.float() for pages in layer.gather(block_tables[request], reach))
        # In blocks, so that the scores of many rows need no more memory than those of a few.
        for begin in range(rows.start, rows.stop, BLOCK_ROWS):
            block = slice(begin, min(begin + BLOCK_ROWS, rows.stop))
            out[block] = _attend(query[block].float(), keys, values, positions[block], scale)
    return out


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    rows, heads, dim = query.shape
    reach = int(positions[-1]) + 1
    keys, values = keys[:reach].transpose(0, 1), values[:reach].transpose(0, 1)
    grouped = query.view(rows, len(keys), -1, dim).permute(1, 2, 0, 3)
    scores = grouped @ keys[:, None].transpose(2, 3) * scale
    hidden = torch.arange(reach, device=query.device) > positions[:, None]
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(rows, heads, dim)
