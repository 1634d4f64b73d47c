"""The Triton kernel of `kv_deviation`.

A program compares one row, all heads. Its floor is its bytes: each element is read once, and a number a row is written.
"""

# Kernels take pointers and numbers that only Triton types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cacheblend.kernels.layer_launch import LayerLaunch
from cacheblend.kernels.pages import PagedLayer

MOST_ELEMENTS = 1024
"""Elements of a row that are compared at a time."""


# Slots may begin anywhere in a table: that shall not compile the kernel again.
@triton.jit(do_not_specialize=["slots"])
def _deviation_kernel(
    out,
    keys,
    values,
    paged_keys,
    paged_values,
    slots,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    ELEMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    keys += row * key_row_stride
    values += row * value_row_stride
    stored = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    paged_keys += stored
    paged_values += stored
    total = tl.zeros([BLOCK_E], tl.float32)
    for start in range(0, ELEMENTS, BLOCK_E):
        element = start + tl.arange(0, BLOCK_E)
        live = element < ELEMENTS
        head, dim = element // HEAD_DIM, element % HEAD_DIM
        old = head * kv_head_stride + dim
        key = tl.load(keys + head * key_head_stride + dim, live, 0.0).to(tl.float32)
        key -= tl.load(paged_keys + old, live, 0.0).to(tl.float32)
        value = tl.load(values + head * value_head_stride + dim, live, 0.0).to(tl.float32)
        value -= tl.load(paged_values + old, live, 0.0).to(tl.float32)
        total += key * key + value * value
    tl.store(out + row, tl.sum(total, 0))


def kv_deviation_triton(
    keys: torch.Tensor, values: torch.Tensor, layer: PagedLayer, slots: torch.Tensor
) -> torch.Tensor:
    """See `kv_deviation`."""
    rows, kv_heads, dim = keys.shape
    out = torch.empty(rows, dtype=torch.float32, device=keys.device)
    if rows:
        compare = LayerLaunch(
            _deviation_kernel, (rows, 1, 1), keys, values, layer.keys, layer.values, slots,
            *keys.stride()[:2], *values.stride()[:2], *layer.keys.stride()[:3],
            kv_heads * dim, dim, layer.block_size, min(MOST_ELEMENTS, triton.next_power_of_2(kv_heads * dim)),
        )  # fmt: skip
        compare(out)
    return out
