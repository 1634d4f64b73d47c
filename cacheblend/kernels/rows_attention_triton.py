"""Attention of scattered rows over a paged cache: the Triton kernel and its launcher.

A program owns one tile (a run of rows of one request) and one kv head. The query heads that share the kv head are
packed beside the rows, so that each key is read once for all of them, and the mask compares each row's own position
with the key's. Key blocks wholly at or before the tile's first row need no mask at all.

Cut tiles (`RowTiles` says when) leave an unnormalised sum, its running maximum and its denominator for each part; a
second kernel merges the parts in key order.
"""

# Kernels take pointers and numbers that only Triton types.
# mypy: allow-untyped-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cacheblend.errors import BlendError
from cacheblend.kernels.layer_launch import LayerLaunch
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.row_tiles import RowTiles

MERGE_ROWS = 16

# Finite, so that a part in which a row sees no key yields a weight of 0 when merged, and never a NaN.
_UNSEEN = tl.constexpr(-1.0e30)


@triton.jit
def _attend_keys(
    total,
    peak,
    weighted,
    query,
    places,
    begin,
    end,
    table,
    keys,
    values,
    block_stride,
    slot_stride,
    log2_scale,
    dims,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Continue an online softmax over the keys from `begin` to `end`, scores in base 2."""
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        if MASKED:
            blocks = tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0)
        else:
            blocks = tl.load(table + at // BLOCK_SIZE)
        slots = at % BLOCK_SIZE
        offsets = (blocks.to(tl.int64) * block_stride + slots * slot_stride)[:, None] + dims[None, :]
        if BLOCK_D == HEAD_DIM:
            key = tl.load(keys + offsets)
        else:
            key = tl.load(keys + offsets, mask=dims[None, :] < HEAD_DIM, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            scores = tl.where(at[None, :] <= places[:, None], scores * log2_scale, _UNSEEN)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * log2_scale)
            weights = tl.exp2(scores * log2_scale - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        weighted = weighted * fade[:, None]
        # What lies beyond the end was never written: a weight of 0 would not silence a NaN there.
        if MASKED:
            value = tl.load(values + offsets, mask=(at < end)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif BLOCK_D == HEAD_DIM:
            value = tl.load(values + offsets)
        else:
            value = tl.load(values + offsets, mask=dims[None, :] < HEAD_DIM, other=0.0)
        weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision="ieee")
        peak = new_peak
    return total, peak, weighted


@triton.jit(do_not_specialize=["table_stride"])
def _rows_attention_kernel(
    out,
    query,
    keys,
    values,
    part_sums,
    part_peaks,
    part_totals,
    work,
    block_tables,
    positions,
    log2_scale,
    query_row_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    item = work + tl.program_id(0) // KV_HEADS * 6
    kv_head = tl.program_id(0) % KV_HEADS
    first_row = tl.load(item)
    rows = tl.load(item + 1)
    request = tl.load(item + 2)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    part = tl.load(item + 5)

    packed = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    used = packed < rows * GROUP
    row = first_row + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    filled = used[:, None] & (dims < HEAD_DIM)[None, :]
    smallest = tl.load(positions + first_row).to(tl.int32)
    # Unused places stand at the smallest position: any that the tile reaches would do.
    places = tl.load(positions + row, mask=used, other=0).to(tl.int32)
    places = tl.where(used, places, smallest)
    query_at = query + row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(query_at[:, None] + dims[None, :], mask=filled, other=0.0)

    table = block_tables + request.to(tl.int64) * table_stride
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], _UNSEEN, tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Up to here every row of the tile sees every key.
    clear_end = tl.minimum((smallest + 1) // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N)
    clear_end = tl.maximum(clear_end, begin)
    total, peak, weighted = _attend_keys(
        total, peak, weighted, q, places, begin, clear_end, table, keys, values,
        block_stride, slot_stride, log2_scale, dims,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, False,
    )  # fmt: skip
    total, peak, weighted = _attend_keys(
        total, peak, weighted, q, places, clear_end, end, table, keys, values,
        block_stride, slot_stride, log2_scale, dims,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, True,
    )  # fmt: skip

    if part < 0:
        out_at = out + (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
        answer = (weighted / total[:, None]).to(out.dtype.element_ty)
        tl.store(out_at[:, None] + dims[None, :], answer, mask=filled)
    else:
        place = (part.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + packed
        tl.store(part_peaks + place, peak)
        tl.store(part_totals + place, total)
        tl.store(part_sums + place[:, None] * HEAD_DIM + dims[None, :], weighted, mask=filled)


@triton.jit
def _merge_parts_kernel(
    out,
    part_sums,
    part_peaks,
    part_totals,
    merges,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MERGE_M: tl.constexpr,
):
    merge = merges + tl.program_id(0) // KV_HEADS * 4
    kv_head = tl.program_id(0) % KV_HEADS
    first_row = tl.load(merge)
    rows = tl.load(merge + 1)
    first_part = tl.load(merge + 2)
    parts = tl.load(merge + 3)

    packed = tl.program_id(1) * MERGE_M + tl.arange(0, MERGE_M)
    dims = tl.arange(0, BLOCK_D)
    filled = (packed < rows * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    total = tl.zeros([MERGE_M], tl.float32)
    peak = tl.full([MERGE_M], _UNSEEN, tl.float32)
    weighted = tl.zeros([MERGE_M, BLOCK_D], tl.float32)
    place = (first_part.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + packed
    for _ in range(parts):
        part_peak = tl.load(part_peaks + place)
        sums = tl.load(part_sums + place[:, None] * HEAD_DIM + dims[None, :], mask=filled, other=0.0)
        new_peak = tl.maximum(peak, part_peak)
        old_share = tl.exp2(peak - new_peak)
        new_share = tl.exp2(part_peak - new_peak)
        total = total * old_share + tl.load(part_totals + place) * new_share
        weighted = weighted * old_share[:, None] + sums * new_share[:, None]
        peak = new_peak
        place += KV_HEADS * BLOCK_M

    row = first_row + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    out_at = out + (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    answer = (weighted / total[:, None]).to(out.dtype.element_ty)
    tl.store(out_at[:, None] + dims[None, :], answer, mask=filled)


class RowsLaunches:
    """The kernel for layers whose tensors have one form, and the merge of cut tiles where there are any.

    Args:
        query: [rows, heads, head_dim], last stride 1, rows sorted by request and position.
        layer: paged keys and values, of the query's dtype.
        block_tables: [requests, max_blocks] int32, last stride 1.
        positions: [rows] int32 or int64.
        scale: factor on the scores, above 0.
        tiles: made from the same rows for these heads, on the query's device.

    Raises:
        BlendError: `tiles` were made for other rows or heads, or reach beyond the block tables.
    """

    def __init__(
        self,
        query: torch.Tensor,
        layer: PagedLayer,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
        tiles: RowTiles,
    ) -> None:
        _require_fitting_tiles(query, layer, block_tables, tiles)
        dim, kv_heads, config = query.shape[2], layer.kv_heads, tiles.config
        shape = (kv_heads, tiles.group, dim, max(16, triton.next_power_of_2(dim)), config.block_m)
        sums = torch.empty((tiles.parts, kv_heads, config.block_m, dim), device=query.device)
        peaks, totals = torch.empty((2, *sums.shape[:3]), device=query.device)
        self._attend = LayerLaunch(
            _rows_attention_kernel, (len(tiles.work) * kv_heads, 1, 1),
            sums, peaks, totals, tiles.work, block_tables, positions.contiguous(), scale * math.log2(math.e),
            *query.stride()[:2], *layer.keys.stride()[:3], block_tables.stride(0),
            *shape, config.block_n, layer.block_size,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
        )  # fmt: skip
        self._merge = LayerLaunch(
            _merge_parts_kernel, (len(tiles.merges) * kv_heads, config.block_m // MERGE_ROWS, 1),
            sums, peaks, totals, tiles.merges, *shape, MERGE_ROWS,
        )  # fmt: skip
        self._cut = tiles.parts > 0

    def __call__(self, query: torch.Tensor, layer: PagedLayer, out: torch.Tensor) -> None:
        """One layer.

        Args:
            query: of the form that the launches were made for, as the others.
            layer: see above.
            out: [rows, heads, head_dim] contiguous, of the query's dtype; what is written.
        """
        self._attend(out, query, layer.keys, layer.values)
        if self._cut:
            self._merge(out)


def _require_fitting_tiles(query: torch.Tensor, layer: PagedLayer, block_tables: torch.Tensor, tiles: RowTiles) -> None:
    if tiles.rows != len(query) or tiles.group * layer.kv_heads != query.shape[1]:
        raise BlendError(
            f"tiles of {tiles.rows} rows and {tiles.group} query heads a kv head do not fit query {tuple(query.shape)} "
            f"over {layer.kv_heads} kv heads: make them from the rows of this pass."
        )
    if tiles.requests > len(block_tables) or tiles.reach > block_tables.shape[1] * layer.block_size:
        raise BlendError(
            f"rows of {tiles.requests} requests reach {tiles.reach} positions, but block tables "
            f"{tuple(block_tables.shape)} hold {len(block_tables)} and {block_tables.shape[1] * layer.block_size}: "
            "give every request's whole table."
        )
