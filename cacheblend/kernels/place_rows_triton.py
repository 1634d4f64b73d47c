"""The Triton kernel of `place_rows`.

A program moves a few rows of one kv head: two half keys in, rotated, two half keys out, one value through. Its floor
is its bytes: each element is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cacheblend.kernels.place_rows import StagedRows

_ROWS = 16


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    buffer,
    first,
    layer_step,
    kind_step,
    cos,
    sin,
    slots,
    keys,
    values,
    layer,
    rows,
    block_size,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    row_tile: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    element = tl.arange(0, padded_half)
    live = (row < rows)[:, None] & (element < half)[None, :]
    row_live = row < rows
    source = tl.load(first + row, row_live, 0) + layer * tl.load(layer_step + row, row_live, 0) + head * head_dim
    low = buffer + source[:, None] + element[None, :]
    key_low = tl.load(low, live, 0.0).to(tl.float32)
    key_high = tl.load(low + half, live, 0.0).to(tl.float32)
    value = low + tl.load(kind_step + row, row_live, 0)[:, None]
    value_low = tl.load(value, live, 0.0)
    value_high = tl.load(value + half, live, 0.0)
    turn = row.to(tl.int64)[:, None] * head_dim + element[None, :]
    c_low, s_low = tl.load(cos + turn, live, 0.0), tl.load(sin + turn, live, 0.0)
    c_high, s_high = tl.load(cos + turn + half, live, 0.0), tl.load(sin + turn + half, live, 0.0)
    slot = tl.load(slots + row, row_live, 0)
    block, offset = slot // block_size, slot % block_size
    to_key = keys + (block * key_block + offset * key_token + head * key_head)[:, None] + element[None, :]
    to_value = values + (block * value_block + offset * value_token + head * value_head)[:, None] + element[None, :]
    kind = keys.dtype.element_ty
    tl.store(to_key, (key_low * c_low - key_high * s_low).to(kind), live)
    tl.store(to_key + half, (key_high * c_high + key_low * s_high).to(kind), live)
    tl.store(to_value, value_low, live)
    tl.store(to_value + half, value_high, live)


def place_rows_triton(
    buffer: torch.Tensor, layer: int, rows: StagedRows, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """See `place_rows`."""
    _, block_size, heads, head_dim = keys.shape
    half = head_dim // 2
    count = len(rows.first)
    _place[(triton.cdiv(count, _ROWS), heads)](
        buffer,
        rows.first,
        rows.layer_step,
        rows.kind_step,
        rows.cos,
        rows.sin,
        rows.slots,
        keys,
        values,
        layer,
        count,
        block_size,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        head_dim,
        half,
        triton.next_power_of_2(half),
        _ROWS,
    )
