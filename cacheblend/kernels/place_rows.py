"""Moves stored keys and values into pages: rotates the keys and scatters both, one launch for several layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cacheblend.kernels.stored_rows import StoredRows, StoredSpans, rows_of


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


class PlacePass:
    """Writes some spans' rows into their pages, layers after layers, keys rotated in float32 to their new positions.

    The rotation is composed of the tables at both ends, which cancels their rounding (`cacheblend.relocation`); a key
    that stays is copied bit for bit.

    Args:
        buffer: [elements] of the pages' dtype; what `StoredSpan.first` counts from.
        spans: what lies where and goes where, on the buffer's device.
        pages: of every layer.
        rotations: of the model.
    """

    def __init__(self, buffer: torch.Tensor, spans: StoredSpans, pages: LayersPages, rotations: Rotations) -> None:
        self._given = (buffer, spans, pages, rotations)
        self._launches: Any = None
        if buffer.is_cuda:
            # Here, for triton is not installed where there is no GPU.
            from cacheblend.kernels.place_rows_triton import PlaceLaunches

            self._launches = PlaceLaunches(*self._given)

    def place(self, turn: int, first_layer: int, layers: int) -> None:
        """Write a group of layers, for what is queued on the current stream afterwards.

        Args:
            turn: where the group lies, in steps of `StoredSpan.turn_step`.
            first_layer: of the group, counted within the model.
            layers: how many.
        """
        if self._launches is not None:
            self._launches.place(turn, first_layer, layers)
        else:
            place_rows_torch(*self._given, turn, first_layer, layers)


def place_rows_torch(
    buffer: torch.Tensor,
    spans: StoredSpans,
    pages: LayersPages,
    rotations: Rotations,
    turn: int,
    first_layer: int,
    layers: int,
) -> None:
    """What `PlacePass` means, in plain PyTorch; every source lies in the buffer's storage, all pages in one other."""
    block_size, heads, head_dim = pages.keys.shape[1:]
    rows = rows_of(spans, block_size)
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
