"""How far new keys and values are from those that lie in a paged cache."""

from __future__ import annotations

import torch

from cacheblend.errors import BlendError
from cacheblend.kernels.pages import PagedLayer


def kv_deviation(keys: torch.Tensor, values: torch.Tensor, layer: PagedLayer, slots: torch.Tensor) -> torch.Tensor:
    """The squared distance between each row's new keys and values and those in its slot, over all heads.

    Differences and sums are float32. A row's result does not depend on the other rows. On CUDA a Triton kernel reads
    every element once; elsewhere plain PyTorch does the same.

    Args:
        keys: [rows, kv_heads, head_dim] of the pages' dtype, rotated; last stride 1.
        values: as `keys`, with strides of its own.
        layer: paged keys and values.
        slots: [rows] int64 contiguous: block times block size plus place in the block.

    Returns:
        [rows] float32.

    Raises:
        BlendError: shapes, dtypes or strides do not fit together.
    """
    if keys.shape != (len(slots), layer.kv_heads, layer.head_dim) or keys.shape != values.shape:
        raise BlendError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit {len(slots)} slots of "
            f"{layer.kv_heads} kv heads of {layer.head_dim}: give one key and one value a slot."
        )
    if not keys.dtype == values.dtype == layer.keys.dtype or slots.dtype != torch.int64:
        raise BlendError(
            f"keys are {keys.dtype}, values {values.dtype}, the cache {layer.keys.dtype} and slots {slots.dtype}: "
            "give keys and values as the cache's, and int64 slots."
        )
    if keys.stride(2) != 1 or values.stride(2) != 1 or slots.stride(0) != 1:
        raise BlendError("the head dimension of keys or values, or the list of slots, has gaps: make it contiguous.")
    if not keys.is_cuda:
        blocks, offsets = slots // layer.block_size, slots % layer.block_size
        return squared_distance((keys, values), (layer.keys[blocks, offsets], layer.values[blocks, offsets]))
    # Here, for triton is not installed where there is no GPU.
    from cacheblend.kernels.kv_deviation_triton import kv_deviation_triton

    return kv_deviation_triton(keys, values, layer, slots)


def squared_distance(new: tuple[torch.Tensor, torch.Tensor], old: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What the kernel must equal: [rows] float32 from keys and values, each [rows, kv_heads, head_dim]."""
    of_keys, of_values = ((n.float() - o.float()).pow(2).sum((1, 2)) for n, o in zip(new, old, strict=True))
    return of_keys + of_values
