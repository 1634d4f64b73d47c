"""The Triton kernels of `DriftPass`: one finds what a few rows tell, one moves a tile of a chunk's rows by it."""

# Kernels take pointers and numbers that only Triton types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cacheblend.drift import PRIOR, REACH
from cacheblend.kernels.carry_drift import TILE_ROWS, DriftingRows, KeysValues
from cacheblend.kernels.layer_launch import LayerLaunch
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.place_rows import Rotations

TELLING_ROWS = 16
"""Rows that tell, of one program."""
STEP_ROWS = 32
"""Rows that tell, of one product."""


# Tables may begin anywhere, and numbers of rows be anything: that shall not compile a kernel again.
@triton.jit(do_not_specialize=["of_pass", "slots", "at", "positions", "rows", "told_values"])
def _tell(
    keys,
    values,
    paged_keys,
    paged_values,
    drifts,
    of_pass,
    slots,
    at,
    positions,
    cos,
    sin,
    rows,
    inverse_norm,
    told_values,
    key_row,
    key_head,
    value_row,
    value_head,
    block_stride,
    token_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # A table of a fixed size has rows without a slot behind those that tell.
    slot = tl.load(slots + row, row < rows, -1)
    row_live = slot >= 0
    element = tl.arange(0, PADDED_HALF)
    live = row_live[:, None] & (element < HALF)[None, :]

    place = tl.load(at + row, row_live, 0)
    turn = tl.load(positions + place, row_live, 0)[:, None] * HALF + element[None, :]
    c, s = tl.load(cos + turn, live, 0.0) * inverse_norm, tl.load(sin + turn, live, 0.0) * inverse_norm
    old = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride + head * head_stride
    old = old[:, None] + element[None, :]
    index = tl.load(of_pass + row, row_live, 0)
    key = keys + (index * key_row + head * key_head)[:, None] + element[None, :]
    low = tl.load(key, live, 0.0).to(tl.float32) - tl.load(paged_keys + old, live, 0.0).to(tl.float32)
    high = tl.load(key + HALF, live, 0.0).to(tl.float32) - tl.load(paged_keys + old + HALF, live, 0.0).to(tl.float32)
    out = drifts + ((place * HEADS + head) * (2 * HALF))[:, None] + element[None, :]
    tl.store(out, low * c + high * s, live)
    tl.store(out + HALF, high * c - low * s, live)

    value = values + (index * value_row + head * value_head)[:, None] + element[None, :]
    low = tl.load(value, live, 0.0).to(tl.float32) - tl.load(paged_values + old, live, 0.0).to(tl.float32)
    high = tl.load(value + HALF, live, 0.0).to(tl.float32)
    high -= tl.load(paged_values + old + HALF, live, 0.0).to(tl.float32)
    tl.store(out + told_values, low, live)
    tl.store(out + told_values + HALF, high, live)


@triton.jit
def _add(pointers, shift, live):
    stored = tl.load(pointers, live, 0.0)
    tl.store(pointers, (stored.to(tl.float32) + shift).to(stored.dtype), live)


@triton.jit(do_not_specialize=["tiles", "told_positions", "slots", "positions", "told_values"])
def _move(
    paged_keys,
    paged_values,
    drifts,
    tiles,
    told_positions,
    slots,
    positions,
    cos,
    sin,
    told_values,
    reach,
    prior,
    block_stride,
    token_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 4
    head = tl.program_id(1)
    first_row, end_row = tl.load(tile), tl.load(tile + 1)
    if first_row >= end_row:
        return
    row = first_row + tl.arange(0, ROWS)
    row_live = row < end_row
    first, end = tl.load(tile + 2), tl.load(tile + 3)
    element = tl.arange(0, PADDED_HALF)
    position = tl.load(positions + row, row_live, 0)

    total = tl.zeros([ROWS], tl.float32)
    key_low = tl.zeros([ROWS, PADDED_HALF], tl.float32)
    key_high = tl.zeros([ROWS, PADDED_HALF], tl.float32)
    value_low = tl.zeros([ROWS, PADDED_HALF], tl.float32)
    value_high = tl.zeros([ROWS, PADDED_HALF], tl.float32)
    for start in range(first, end, STEP):
        told = start + tl.arange(0, STEP)
        told_live = told < end
        distance = tl.abs(position[:, None] - tl.load(told_positions + told, told_live, 0)[None, :])
        weights = tl.where(told_live[None, :], tl.exp(-distance.to(tl.float32) / reach), 0.0)
        total += tl.sum(weights, 1)
        live = told_live[:, None] & (element < HALF)[None, :]
        drift = drifts + ((told * HEADS + head) * (2 * HALF))[:, None] + element[None, :]
        key_low = tl.dot(weights, tl.load(drift, live, 0.0), key_low, input_precision=PRECISION)
        key_high = tl.dot(weights, tl.load(drift + HALF, live, 0.0), key_high, input_precision=PRECISION)
        drift += told_values
        value_low = tl.dot(weights, tl.load(drift, live, 0.0), value_low, input_precision=PRECISION)
        value_high = tl.dot(weights, tl.load(drift + HALF, live, 0.0), value_high, input_precision=PRECISION)

    share = (1.0 / (total + prior))[:, None]
    key_low *= share
    key_high *= share
    live = row_live[:, None] & (element < HALF)[None, :]
    turn = position[:, None] * HALF + element[None, :]
    c, s = tl.load(cos + turn, live, 0.0), tl.load(sin + turn, live, 0.0)
    slot = tl.load(slots + row, row_live, 0)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride + head * head_stride
    place = place[:, None] + element[None, :]
    _add(paged_keys + place, key_low * c - key_high * s, live)
    _add(paged_keys + place + HALF, key_high * c + key_low * s, live)
    _add(paged_values + place, value_low * share, live)
    _add(paged_values + place + HALF, value_high * share, live)


class DriftLaunches:
    """Both kernels, for all layers whose tensors are of one form.

    Args:
        keys, values: see `DriftPass.move`.
        layer: one of the layers.
        rows: what tells and what moves.
        rotations: of the model.
    """

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, layer: PagedLayer, rows: DriftingRows, rotations: Rotations
    ) -> None:
        heads, head_dim = layer.kv_heads, layer.head_dim
        half = head_dim // 2
        padded = max(16, triton.next_power_of_2(half))
        of_pass, told = len(rows.of_pass), len(rows.told_positions)
        self._drifts = torch.empty(2, told, heads, head_dim, dtype=torch.float32, device=keys.device)
        self._others = rows.not_of_pass if told > of_pass else None
        pages, told_values = layer.keys.stride()[:3], self._drifts[0].numel()
        self._tell = LayerLaunch(
            _tell, (triton.cdiv(of_pass, TELLING_ROWS), heads, 1),
            self._drifts, rows.of_pass, rows.of_pass_slots, rows.of_pass_at, rows.told_positions,
            rotations.cos, rotations.sin, of_pass, 1.0 / rotations.scaling**2, told_values,
            *keys.stride()[:2], *values.stride()[:2], *pages,
            layer.block_size, heads, half, padded, TELLING_ROWS,
        ) if of_pass else None  # fmt: skip
        # Exact products where exactness is asked for; the pages of a smaller dtype round more than these do.
        precision = "ieee" if layer.keys.dtype == torch.float32 else "tf32"
        self._move = LayerLaunch(
            _move, (len(rows.tiles), heads, 1),
            self._drifts, rows.tiles, rows.told_positions, rows.left_slots, rows.left_positions,
            rotations.cos, rotations.sin, told_values, REACH, PRIOR, *pages,
            layer.block_size, heads, half, padded, TILE_ROWS, STEP_ROWS, precision,
            num_warps=4,
        )  # fmt: skip

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, layer: PagedLayer, more: KeysValues | None) -> None:
        """See `DriftPass.move`."""
        if self._tell is not None:
            self._tell(keys, values, layer.keys, layer.values)
        if more is not None and self._others is not None:
            self._drifts[:, self._others] = torch.stack(more)
        self._move(layer.keys, layer.values)
