"""Moves stored keys and values into pages: rotates the keys and scatters both, one launch a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class StagedRows:
    """Rows of stored KV in one flat buffer that holds some layers of several chunks.

    A chunk lies in it as [layers, 2, tokens, kv_heads, head_dim], contiguous, keys before values.

    Attributes:
        first: [rows] int64, element offset of each row's keys in the buffer's first layer.
        layer_step: [rows] int64, elements from one layer to the next in the row's chunk.
        kind_step: [rows] int64, elements from its keys to its values.
        cos, sin: [rows, head_dim] float32, the rotation from where each key was encoded to where it is used.
        slots: [rows] int64, where each row goes: block * block_size + offset.
    """

    first: torch.Tensor
    layer_step: torch.Tensor
    kind_step: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor


def place_rows(buffer: torch.Tensor, layer: int, rows: StagedRows, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write one layer's rows into its pages, keys rotated in float32 (arXiv:2104.09864, equation 34).

    Args:
        buffer: [elements] of the pages' dtype.
        layer: counted within the buffer.
        rows: what lies where and goes where.
        keys: [blocks, block_size, kv_heads, head_dim] strided view of the pages; last stride 1.
        values: as `keys`.
    """
    if buffer.is_cuda:
        # Here, for triton is not installed where there is no GPU.
        from cacheblend.kernels.place_rows_triton import place_rows_triton

        place_rows_triton(buffer, layer, rows, keys, values)
    else:
        place_rows_torch(buffer, layer, rows, keys, values)


def place_rows_torch(
    buffer: torch.Tensor, layer: int, rows: StagedRows, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """What `place_rows` means, in plain PyTorch."""
    block_size, heads, head_dim = keys.shape[1:]
    elements = torch.arange(heads * head_dim, device=buffer.device)
    at = (rows.first + layer * rows.layer_step)[:, None] + elements
    shape = (len(rows.first), heads, head_dim)
    stored_keys = buffer[at].view(shape)
    stored_values = buffer[at + rows.kind_step[:, None]].view(shape)
    half = head_dim // 2
    wide = stored_keys.float()
    turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
    moved = wide * rows.cos[:, None] + turned * rows.sin[:, None]
    blocks, offsets = rows.slots // block_size, rows.slots % block_size
    keys[blocks, offsets] = moved.to(keys.dtype)
    values[blocks, offsets] = stored_values
