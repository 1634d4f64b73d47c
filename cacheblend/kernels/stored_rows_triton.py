"""The Triton kernel of `stored_rows`: a program writes some rows of one span.

It reads the fields of a `StoredSpan` by their number, in the order in which that has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cacheblend.kernels.layer_launch import LayerLaunch

_ROWS = 256


@triton.jit(do_not_specialize=["rows"])
def _write_rows(  # type: ignore[no-untyped-def]
    out,
    spans,
    blocks,
    rows,
    fields: tl.constexpr,
    block_size: tl.constexpr,
    row_tile: tl.constexpr,
):
    span = spans + tl.program_id(0) * fields
    within = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    live = within < tl.load(span + 8)
    at = out + tl.load(span + 9) + within
    new = tl.load(span + 6) + within
    tl.store(at, tl.load(span) + within * tl.load(span + 7), live)
    for step in tl.static_range(1, 5):
        tl.store(at + step * rows, within * 0 + tl.load(span + step), live)
    tl.store(at + 5 * rows, tl.load(span + 5) + within, live)
    tl.store(at + 6 * rows, new, live)
    block = tl.load(blocks + tl.load(span + 10) + new // block_size, live, 0)
    tl.store(at + 7 * rows, block * block_size + new % block_size, live)


def rows_of_spans_triton(
    spans: torch.Tensor, blocks: torch.Tensor, block_size: int, rows: int, longest: int
) -> torch.Tensor:
    """See `rows_of_spans`.

    Args:
        spans: [spans, 11] int64, on a GPU.
        blocks: [n] int64, there as well.
        block_size: tokens of a block.
        rows: of all spans.
        longest: rows of the longest span.

    Returns:
        [8, rows] int64 on the GPU.
    """
    out = torch.empty(8, rows, dtype=torch.int64, device=spans.device)
    grid = (len(spans), triton.cdiv(longest, _ROWS), 1)
    LayerLaunch(_write_rows, grid, spans, blocks, rows, spans.shape[1], block_size, _ROWS)(out)
    return out
