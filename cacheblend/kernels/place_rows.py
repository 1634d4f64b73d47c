"""Moves stored keys and values into pages: rotates the keys and scatters both, one launch for several layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows of stored KV, wherever on the device they lie, and where they go. Every attribute is [rows] int64.

    A chunk lies in memory as [layers, 2, tokens, kv_heads, head_dim], contiguous, keys before values. Layers are placed
    in groups: a chunk that is copied to the device group by group has room there for a few layers, which groups use in
    turns; one that is on the device as a whole lies there with all its layers.

    Attributes:
        first: elements from the buffer's start to the row's keys in the first layer that there is room for, or of the
            model where the whole chunk is on the device. May reach any memory of the device.
        turn_step: elements from one turn to the next; 0 where the whole chunk is on the device.
        model_step: elements from one of the model's layers to the next; 0 for chunks that take turns.
        layer_step: elements from one layer of a group to the next.
        kind_step: elements from the row's keys to its values.
        old: position that the key was encoded for.
        new: position that it is used at.
        slots: where the row goes: block * block_size + offset.
    """

    first: torch.Tensor
    turn_step: torch.Tensor
    model_step: torch.Tensor
    layer_step: torch.Tensor
    kind_step: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayersPages:
    """The pages of all layers, alike but for where they begin.

    Attributes:
        keys: [blocks, block_size, kv_heads, head_dim] strided view of layer 0's pages; last stride 1.
        values: as `keys`, with the same strides.
        layer_offsets: [layers] int64, elements from layer 0's pages to each layer's.
    """

    keys: torch.Tensor
    values: torch.Tensor
    layer_offsets: torch.Tensor


@dataclass(frozen=True, eq=False)
class Rotations:
    """The model's rotary tables for every position.

    Attributes:
        cos, sin: [positions, head_dim / 2] float32, scaling included.
        scaling: the factor they carry.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    scaling: float


def place_rows(
    buffer: torch.Tensor,
    rows: StoredRows,
    pages: LayersPages,
    rotations: Rotations,
    turn: int,
    first_layer: int,
    layers: int,
) -> None:
    """Write some layers' rows into their pages, keys rotated in float32 from their old to their new positions.

    The rotation is composed of the tables at both ends, which cancels their rounding (`cacheblend.relocation`); a key
    that stays is copied bit for bit.

    Args:
        buffer: [elements] of the pages' dtype; what `rows.first` counts from.
        rows: what lies where and goes where.
        pages: of every layer.
        rotations: of the model.
        turn: where the group lies, in steps of `rows.turn_step`.
        first_layer: of the group, counted within the model.
        layers: how many of the group are placed.
    """
    if buffer.is_cuda:
        # Here, for triton is not installed where there is no GPU.
        from cacheblend.kernels.place_rows_triton import place_rows_triton

        place_rows_triton(buffer, rows, pages, rotations, turn, first_layer, layers)
    else:
        place_rows_torch(buffer, rows, pages, rotations, turn, first_layer, layers)


def place_rows_torch(
    buffer: torch.Tensor,
    rows: StoredRows,
    pages: LayersPages,
    rotations: Rotations,
    turn: int,
    first_layer: int,
    layers: int,
) -> None:
    """What `place_rows` means, in plain PyTorch; every source lies in the buffer's storage, all pages in one other."""
    block_size, heads, head_dim = pages.keys.shape[1:]
    elements = torch.arange(heads * head_dim, device=buffer.device)
    memory = buffer.as_strided((buffer.untyped_storage().nbytes() // buffer.element_size(),), (1,), 0)
    start = int(buffer.storage_offset())
    first = start + rows.first + turn * rows.turn_step + first_layer * rows.model_step
    blocks, offsets = rows.slots // block_size, rows.slots % block_size
    cos, sin = _between(rotations, rows)
    shape = (len(first), heads, head_dim)
    for within in range(layers):
        at = (first + within * rows.layer_step)[:, None] + elements
        low, high = memory[at].view(shape).float().chunk(2, dim=-1)
        moved = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        keys, values = (_of_layer(view, pages, first_layer + within) for view in (pages.keys, pages.values))
        keys[blocks, offsets] = moved.to(keys.dtype)
        values[blocks, offsets] = memory[at + rows.kind_step[:, None]].view(shape)


def _between(rotations: Rotations, rows: StoredRows) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [rows, 1, head_dim / 2] float32, exactly (1, 0) where a key stays."""
    cos_old, sin_old = rotations.cos[rows.old], rotations.sin[rows.old]
    cos_new, sin_new = rotations.cos[rows.new], rotations.sin[rows.new]
    norm = rotations.scaling**2
    stays = (rows.old == rows.new)[:, None]
    cos = ((cos_new * cos_old + sin_new * sin_old) / norm).masked_fill(stays, 1.0)
    sin = ((sin_new * cos_old - cos_new * sin_old) / norm).masked_fill(stays, 0.0)
    return cos[:, None], sin[:, None]


def _of_layer(view: torch.Tensor, pages: LayersPages, layer: int) -> torch.Tensor:
    return view.as_strided(view.shape, view.stride(), view.storage_offset() + int(pages.layer_offsets[layer]))
