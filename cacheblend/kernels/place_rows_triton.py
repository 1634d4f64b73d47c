"""The Triton kernel of `PlacePass`.

A program moves a few rows of one span, of one kv head of one layer: two half keys in, rotated, two half keys out, one
value through. Its floor is its bytes: each element is read once and written once. It reads the fields of a `StoredSpan`
by their number, in the order in which that has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cacheblend.kernels.layer_launch import LayerLaunch
from cacheblend.kernels.place_rows import LayersPages, Rotations
from cacheblend.kernels.stored_rows import StoredSpans

_ROWS = 16


@triton.jit(do_not_specialize=["turn", "first_layer", "tiles"])
def _place(  # type: ignore[no-untyped-def]
    buffer,
    turn,
    first_layer,
    spans,
    blocks,
    tiles,
    cos,
    sin,
    keys,
    values,
    layer_offsets,
    inverse_norm,
    key_block,
    key_token,
    key_head,
    fields: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    row_tile: tl.constexpr,
):
    span = spans + tl.program_id(0) // tiles * fields
    head = tl.program_id(1)
    layer = tl.program_id(2)
    row = tl.program_id(0) % tiles * row_tile + tl.arange(0, row_tile)
    row_live = row < tl.load(span + 8)
    element = tl.arange(0, padded_half)
    live = row_live[:, None] & (element < half)[None, :]

    was, becomes = tl.load(span + 6) + row, tl.load(span + 7) + row
    from_at = was[:, None] * half + element[None, :]
    to_at = becomes[:, None] * half + element[None, :]
    cos_old, sin_old = tl.load(cos + from_at, live, 0.0), tl.load(sin + from_at, live, 0.0)
    cos_new, sin_new = tl.load(cos + to_at, live, 0.0), tl.load(sin + to_at, live, 0.0)
    stays = (was == becomes)[:, None]
    c = tl.where(stays, 1.0, (cos_new * cos_old + sin_new * sin_old) * inverse_norm)
    s = tl.where(stays, 0.0, (sin_new * cos_old - cos_new * sin_old) * inverse_norm)

    source = tl.load(span) + turn * tl.load(span + 1) + first_layer * tl.load(span + 2)
    source += layer * tl.load(span + 3) + head * head_dim
    key = buffer + (source + row * tl.load(span + 5))[:, None] + element[None, :]
    low, high = tl.load(key, live, 0.0).to(tl.float32), tl.load(key + half, live, 0.0).to(tl.float32)
    value = key + tl.load(span + 4)
    value_low, value_high = tl.load(value, live, 0.0), tl.load(value + half, live, 0.0)

    block = tl.load(blocks + tl.load(span + 9) + becomes // block_size, row_live, 0)
    page = tl.load(layer_offsets + first_layer + layer) + head * key_head
    place = (page + block * key_block + becomes % block_size * key_token)[:, None] + element[None, :]
    kind = keys.dtype.element_ty
    tl.store(keys + place, (low * c - high * s).to(kind), live)
    tl.store(keys + place + half, (high * c + low * s).to(kind), live)
    tl.store(values + place, value_low, live)
    tl.store(values + place + half, value_high, live)


class PlaceLaunches:
    """See `PlacePass`."""

    def __init__(self, buffer: torch.Tensor, spans: StoredSpans, pages: LayersPages, rotations: Rotations) -> None:
        _, block_size, self._heads, head_dim = pages.keys.shape
        half = head_dim // 2
        tiles = triton.cdiv(spans.longest, _ROWS)
        self._buffer = buffer
        self._programs = len(spans.table) * tiles
        self._fixed = (
            spans.table,
            spans.blocks,
            tiles,
            rotations.cos,
            rotations.sin,
            pages.keys,
            pages.values,
            pages.layer_offsets,
            1.0 / rotations.scaling**2,
            *pages.keys.stride()[:3],
            spans.table.shape[1],
            block_size,
            head_dim,
            half,
            triton.next_power_of_2(half),
            _ROWS,
        )
        self._launches: dict[int, LayerLaunch] = {}

    def place(self, turn: int, first_layer: int, layers: int) -> None:
        """See `PlacePass.place`."""
        if layers not in self._launches:
            self._launches[layers] = LayerLaunch(_place, (self._programs, self._heads, layers), *self._fixed)
        self._launches[layers](self._buffer, turn, first_layer)
