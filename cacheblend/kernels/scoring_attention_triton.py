"""Attention of a question with its tally: three Triton kernels and their launcher.

The query heads that share a kv head are packed beside the rows into one list of query vectors, row by row, so that
each key is read once for all of them. Keys are counted in blocks, first those of the context, then the question's own.

1. A program attends from a tile of query vectors to one part of the blocks, and leaves an unnormalised sum, its
   running maximum and its denominator.
2. The parts are merged in key order into the output, and into each vector's maximum and inverse denominator.
3. A program takes one block of the context's keys, recomputes every query vector's weight on them from those two, and
   adds them up. It alone writes its part of the mass, in one order: repeated calls give the same bits.

How many rows, keys and parts there are is read from the device: a CUDA graph of launches with room for more serves
every question that fits, and gives the bits of launches of its own.
"""

# Kernels take pointers and numbers that only Triton types.
# mypy: allow-untyped-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cacheblend.kernels.layer_launch import LayerLaunch
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.scoring_attention import ScoringPlan, ScoringRoom

MERGE_VECTORS = 16
MOST_TALLYING = 128
"""Programs of a kv head that tally; with more blocks of keys each takes several."""

# Finite, so that a part in which a vector sees no key yields a weight of 0 when merged, and never a NaN.
_UNSEEN = tl.constexpr(-1.0e30)


@triton.jit
def _vectors(base, offsets, live, dims, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Load [n, BLOCK_D] elements at `offsets`; zeros beyond the head, and where `live` is false if that may be."""
    if MASKED:
        found = tl.load(base + offsets, mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif BLOCK_D == HEAD_DIM:
        found = tl.load(base + offsets)
    else:
        found = tl.load(base + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return found


@triton.jit
def _page_offsets(at, live, table, block_stride, slot_stride, dims, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """[n, BLOCK_D] offsets of the context's positions `at`."""
    blocks = tl.load(table + at // BLOCK_SIZE, mask=live, other=0) if MASKED else tl.load(table + at // BLOCK_SIZE)
    return (blocks.to(tl.int64) * block_stride + at % BLOCK_SIZE * slot_stride)[:, None] + dims[None, :]


@triton.jit
def _fold(total, peak, weighted, products, value, log2_scale):
    """Take a block of keys into an online softmax in base 2; `products` are not scaled yet."""
    new_peak = tl.maximum(peak, tl.max(products, 1) * log2_scale)
    weights = tl.exp2(products * log2_scale - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    total = total * fade + tl.sum(weights, 1)
    weighted = weighted * fade[:, None]
    weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision="ieee")
    return total, new_peak, weighted


@triton.jit
def _attend_context(
    total,
    peak,
    weighted,
    query,
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
    """Continue an online softmax over the context's keys from `begin` to `end`."""
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        live = at < end
        offsets = _page_offsets(at, live, table, block_stride, slot_stride, dims, BLOCK_SIZE, MASKED)
        key = _vectors(keys, offsets, live, dims, HEAD_DIM, BLOCK_D, MASKED)
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            products = tl.where(live[None, :], products, _UNSEEN)
        # What lies beyond the end was never written: a weight of 0 would not silence a NaN there.
        value = _vectors(values, offsets, live, dims, HEAD_DIM, BLOCK_D, MASKED)
        total, peak, weighted = _fold(total, peak, weighted, products, value, log2_scale)
    return total, peak, weighted


@triton.jit
def _attend_own(
    total,
    peak,
    weighted,
    query,
    places,
    begin,
    end,
    keys,
    values,
    key_stride,
    value_stride,
    log2_scale,
    dims,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Continue an online softmax over the question's own keys from `begin` to `end`, each vector up to its place."""
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        live = at < end
        key = _vectors(keys, at[:, None] * key_stride + dims[None, :], live, dims, HEAD_DIM, BLOCK_D, True)
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        products = tl.where(at[None, :] <= places[:, None], products, _UNSEEN)
        value = _vectors(values, at[:, None] * value_stride + dims[None, :], live, dims, HEAD_DIM, BLOCK_D, True)
        total, peak, weighted = _fold(total, peak, weighted, products, value, log2_scale)
    return total, peak, weighted


# Where a table or a row begins differs from request to request: none of them shall compile a kernel again.
_VARYING = ["table", "sizes", "mass", "mass_stride"]


@triton.jit(do_not_specialize=_VARYING)
def _attend_kernel(
    query,
    own_keys,
    own_values,
    keys,
    values,
    sums,
    stats,
    table,
    sizes,
    log2_scale,
    query_row_stride,
    query_head_stride,
    own_key_stride,
    own_key_head_stride,
    own_value_stride,
    own_value_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    first_row, rows, own = tl.load(sizes).to(tl.int64), tl.load(sizes + 1), tl.load(sizes + 2)
    context, parts = tl.load(sizes + 3), tl.load(sizes + 4)
    vectors = rows * GROUP
    tiles = tl.maximum(tl.cdiv(vectors, BLOCK_M), 1)
    tile, part = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if part >= parts:
        return
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    query += first_row * query_row_stride
    own_keys += first_row * own_key_stride
    own_values += first_row * own_value_stride
    vector = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    used = vector < vectors
    row = vector // GROUP
    offsets = row.to(tl.int64) * query_row_stride + (kv_head * GROUP + vector % GROUP) * query_head_stride
    q = _vectors(query, offsets[:, None] + dims[None, :], used, dims, HEAD_DIM, BLOCK_D, True)
    # Vectors beyond the last stand where it stands.
    places = own - rows + tl.minimum(row, rows - 1)

    reach = own - rows + tl.minimum(tile * BLOCK_M + BLOCK_M - 1, vectors - 1) // GROUP + 1
    context_blocks = tl.cdiv(context, BLOCK_N)
    blocks = context_blocks + tl.cdiv(reach, BLOCK_N)
    first = blocks * part // parts
    last = blocks * (part + 1) // parts

    begin = tl.minimum(first * BLOCK_N, context)
    end = tl.minimum(last * BLOCK_N, context)
    clear_end = tl.maximum(end // BLOCK_N * BLOCK_N, begin)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], _UNSEEN, tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride
    total, peak, weighted = _attend_context(
        total, peak, weighted, q, begin, clear_end, table, keys, values,
        block_stride, slot_stride, log2_scale, dims,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, False,
    )  # fmt: skip
    total, peak, weighted = _attend_context(
        total, peak, weighted, q, clear_end, end, table, keys, values,
        block_stride, slot_stride, log2_scale, dims,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, True,
    )  # fmt: skip
    total, peak, weighted = _attend_own(
        total, peak, weighted, q, places,
        tl.maximum(first - context_blocks, 0) * BLOCK_N,
        tl.minimum(tl.maximum(last - context_blocks, 0) * BLOCK_N, reach),
        own_keys + kv_head * own_key_head_stride, own_values + kv_head * own_value_head_stride,
        own_key_stride, own_value_stride, log2_scale, dims,
        HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    place = (part * kv_heads + kv_head).to(tl.int64) * vectors + vector
    tl.store(stats + place, peak, mask=used)
    tl.store(stats + (parts + 1) * (kv_heads * vectors).to(tl.int64) + place, total, mask=used)
    filled = used[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(sums + place[:, None] * HEAD_DIM + dims[None, :], weighted, mask=filled)


@triton.jit(do_not_specialize=_VARYING)
def _merge_kernel(
    out,
    sums,
    stats,
    sizes,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_M: tl.constexpr,
):
    first_row, vectors, parts = tl.load(sizes).to(tl.int64), tl.load(sizes + 1) * GROUP, tl.load(sizes + 4)
    if tl.program_id(0) * MERGE_M >= vectors:
        return
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    vector = tl.program_id(0) * MERGE_M + tl.arange(0, MERGE_M)
    dims = tl.arange(0, BLOCK_D)
    used = vector < vectors
    filled = used[:, None] & (dims < HEAD_DIM)[None, :]
    place = kv_head.to(tl.int64) * vectors + vector
    plane = kv_heads.to(tl.int64) * vectors
    peaks = stats + place
    totals = peaks + (parts + 1) * plane

    peak = tl.full([MERGE_M], _UNSEEN, tl.float32)
    for part in range(parts):
        peak = tl.maximum(peak, tl.load(peaks + part * plane, mask=used, other=_UNSEEN))
    # Vectors beyond the last divide nothing by one.
    total = tl.where(used, 0.0, 1.0)
    weighted = tl.zeros([MERGE_M, BLOCK_D], tl.float32)
    for part in range(parts):
        weight = tl.exp2(tl.load(peaks + part * plane, mask=used, other=_UNSEEN) - peak)
        total += weight * tl.load(totals + part * plane, mask=used, other=0.0)
        at = part * plane + place
        part_sums = tl.load(sums + at[:, None] * HEAD_DIM + dims[None, :], mask=filled, other=0.0)
        weighted += weight[:, None] * part_sums

    tl.store(peaks + parts * plane, peak, mask=used)
    tl.store(totals + parts * plane, 1.0 / total, mask=used)
    head = kv_head * GROUP + vector % GROUP
    out_at = out + ((first_row + vector // GROUP) * (kv_heads * GROUP) + head) * HEAD_DIM
    tl.store(out_at[:, None] + dims[None, :], (weighted / total[:, None]).to(out.dtype.element_ty), mask=filled)


@triton.jit(do_not_specialize=_VARYING)
def _tally_kernel(
    query,
    keys,
    mass,
    stats,
    table,
    sizes,
    log2_scale,
    query_row_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    mass_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    first_row, vectors = tl.load(sizes).to(tl.int64), tl.load(sizes + 1) * GROUP
    context, parts = tl.load(sizes + 3), tl.load(sizes + 4)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    keys += kv_head.to(tl.int64) * kv_head_stride
    query += first_row * query_row_stride + kv_head.to(tl.int64) * GROUP * query_head_stride
    mass += kv_head.to(tl.int64) * mass_stride
    plane = tl.num_programs(1).to(tl.int64) * vectors
    peaks = stats + parts * plane + kv_head * vectors
    shares = peaks + (parts + 1) * plane

    for first_key in range(tl.program_id(0) * BLOCK_KEYS, context, tl.num_programs(0) * BLOCK_KEYS):
        at = first_key + tl.arange(0, BLOCK_KEYS)
        live = at < context
        offsets = _page_offsets(at, live, table, block_stride, slot_stride, dims, BLOCK_SIZE, True)
        key = _vectors(keys, offsets, live, dims, HEAD_DIM, BLOCK_D, True)
        paid = tl.zeros([BLOCK_KEYS], tl.float32)
        for start in range(0, vectors, BLOCK_VECTORS):
            vector = start + tl.arange(0, BLOCK_VECTORS)
            used = vector < vectors
            row_offsets = (vector // GROUP).to(tl.int64) * query_row_stride + vector % GROUP * query_head_stride
            q = _vectors(query, row_offsets[:, None] + dims[None, :], used, dims, HEAD_DIM, BLOCK_D, True)
            peak = tl.load(peaks + vector, mask=used, other=0.0)
            share = tl.load(shares + vector, mask=used, other=0.0)
            products = tl.dot(key, tl.trans(q), input_precision="ieee")
            # The maximum goes off before the denominator comes in: one difference of large numbers, exact where it
            # counts.
            paid += tl.sum(tl.exp2(products * log2_scale - peak[None, :]) * share[None, :], 1)
        tl.store(mass + at, tl.load(mass + at, mask=live, other=0.0) + paid, mask=live)


class ScoringLaunches:
    """The kernels for layers whose tensors have one form; the tally only where there is a context.

    Args:
        query: [.., heads, head_dim], last stride 1; the question's rows and perhaps others.
        own_keys: [.., kv_heads, head_dim], last stride 1.
        own_values: as `own_keys`, with strides of its own.
        layer: paged keys and values.
        block_table: [max_blocks] int32.
        scale: factor on the scores, above 0.
        mass: [kv_heads, context or more] float32, last stride 1; what is added to in place.
        plan: of the question, or of one for its heads and block sizes alone.
        sizes: [5] int32 on the device, `ScoringPlan.sizes` of the question; read by each launch.
        room: the most that `sizes` may say; the question's own by default.
    """

    def __init__(
        self,
        query: torch.Tensor,
        own_keys: torch.Tensor,
        own_values: torch.Tensor,
        layer: PagedLayer,
        block_table: torch.Tensor,
        scale: float,
        mass: torch.Tensor,
        plan: ScoringPlan,
        sizes: torch.Tensor,
        room: ScoringRoom | None = None,
    ) -> None:
        room = room or ScoringRoom.of(plan)
        kv_heads, dim = plan.kv_heads, plan.head_dim
        attend, tally = plan.attend, plan.tally
        shape = (plan.heads // kv_heads, dim, max(16, triton.next_power_of_2(dim)))
        log2_scale = scale * math.log2(math.e)
        strides = query.stride()[:2]
        page_strides = layer.keys.stride()[:3]
        sums = torch.empty(room.partial * kv_heads * dim, dtype=torch.float32, device=query.device)
        # Maxima of every part and of the whole, then denominators of every part and the inverse one of the whole.
        stats = torch.empty(2 * (room.partial + room.vectors) * kv_heads, dtype=torch.float32, device=query.device)
        self._attend = LayerLaunch(
            _attend_kernel, (room.programs, kv_heads, 1),
            sums, stats, block_table, sizes, log2_scale,
            *strides, *own_keys.stride()[:2], *own_values.stride()[:2], *page_strides,
            *shape, attend.block_m, attend.block_n, layer.block_size,
            num_warps=attend.num_warps, num_stages=attend.num_stages, maxnreg=attend.max_registers,
        )  # fmt: skip
        self._merge = LayerLaunch(
            _merge_kernel, (triton.cdiv(room.vectors, MERGE_VECTORS), kv_heads, 1),
            sums, stats, sizes, *shape, MERGE_VECTORS,
        )  # fmt: skip
        self._tally = LayerLaunch(
            _tally_kernel, (min(triton.cdiv(room.context, tally.block_m), MOST_TALLYING), kv_heads, 1),
            mass, stats, block_table, sizes, log2_scale,
            *strides, *page_strides, mass.stride(0), *shape, tally.block_m, tally.block_n, layer.block_size,
            num_warps=tally.num_warps, num_stages=tally.num_stages,
        )  # fmt: skip
        self._context = room.context

    def __call__(
        self,
        query: torch.Tensor,
        own_keys: torch.Tensor,
        own_values: torch.Tensor,
        layer: PagedLayer,
        out: torch.Tensor,
        tally: bool = True,
    ) -> None:
        """One layer.

        Args:
            query: of the form that the launches were made for, as all the others.
            own_keys: see above.
            own_values: see above.
            layer: see above.
            out: [rows, heads, head_dim] contiguous, of the query's dtype; what is written.
            tally: whether it adds to the mass.
        """
        self._attend(query, own_keys, own_values, layer.keys, layer.values)
        self._merge(out)
        if tally and self._context:
            self._tally(query, layer.keys)
