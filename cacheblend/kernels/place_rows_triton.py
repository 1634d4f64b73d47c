"""The Triton kernel of `place_rows`.

A program moves a few rows of one kv head of one layer: two half keys in, rotated, two half keys out, one value through.
Its floor is its bytes: each element is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cacheblend.kernels.layer_launch import LayerLaunch
from cacheblend.kernels.place_rows import LayersPages, Rotations, StoredRows

_ROWS = 16


@triton.jit(do_not_specialize=["turn", "first_layer", "rows"])
def _place(  # type: ignore[no-untyped-def]
    buffer,
    first,
    turn_step,
    model_step,
    layer_step,
    kind_step,
    old,
    new,
    slots,
    cos,
    sin,
    keys,
    values,
    layer_offsets,
    turn,
    first_layer,
    rows,
    inverse_norm,
    key_block,
    key_token,
    key_head,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    row_tile: tl.constexpr,
):
    head = tl.program_id(1)
    within = tl.program_id(2)
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    row_live = row < rows
    element = tl.arange(0, padded_half)
    live = row_live[:, None] & (element < half)[None, :]

    was, becomes = tl.load(old + row, row_live, 0), tl.load(new + row, row_live, 0)
    from_at = was[:, None] * half + element[None, :]
    to_at = becomes[:, None] * half + element[None, :]
    cos_old, sin_old = tl.load(cos + from_at, live, 0.0), tl.load(sin + from_at, live, 0.0)
    cos_new, sin_new = tl.load(cos + to_at, live, 0.0), tl.load(sin + to_at, live, 0.0)
    stays = (was == becomes)[:, None]
    c = tl.where(stays, 1.0, (cos_new * cos_old + sin_new * sin_old) * inverse_norm)
    s = tl.where(stays, 0.0, (sin_new * cos_old - cos_new * sin_old) * inverse_norm)

    source = tl.load(first + row, row_live, 0) + turn * tl.load(turn_step + row, row_live, 0)
    source += first_layer * tl.load(model_step + row, row_live, 0)
    source += within * tl.load(layer_step + row, row_live, 0) + head * head_dim
    key = buffer + source[:, None] + element[None, :]
    low, high = tl.load(key, live, 0.0).to(tl.float32), tl.load(key + half, live, 0.0).to(tl.float32)
    value = key + tl.load(kind_step + row, row_live, 0)[:, None]
    value_low, value_high = tl.load(value, live, 0.0), tl.load(value + half, live, 0.0)

    slot = tl.load(slots + row, row_live, 0)
    page = tl.load(layer_offsets + first_layer + within) + head * key_head
    place = (page + slot // block_size * key_block + slot % block_size * key_token)[:, None] + element[None, :]
    kind = keys.dtype.element_ty
    tl.store(keys + place, (low * c - high * s).to(kind), live)
    tl.store(keys + place + half, (high * c + low * s).to(kind), live)
    tl.store(values + place, value_low, live)
    tl.store(values + place + half, value_high, live)


def place_rows_triton(
    buffer: torch.Tensor,
    rows: StoredRows,
    pages: LayersPages,
    rotations: Rotations,
    turn: int,
    first_layer: int,
    layers: int,
) -> None:
    """See `place_rows`."""
    _, block_size, heads, head_dim = pages.keys.shape
    half = head_dim // 2
    count = len(rows.first)
    place = LayerLaunch(
        _place,
        (triton.cdiv(count, _ROWS), heads, layers),
        rows.first,
        rows.turn_step,
        rows.model_step,
        rows.layer_step,
        rows.kind_step,
        rows.old,
        rows.new,
        rows.slots,
        rotations.cos,
        rotations.sin,
        pages.keys,
        pages.values,
        pages.layer_offsets,
        turn,
        first_layer,
        count,
        1.0 / rotations.scaling**2,
        *pages.keys.stride()[:3],
        block_size,
        head_dim,
        half,
        triton.next_power_of_2(half),
        _ROWS,
    )
    place(buffer)
