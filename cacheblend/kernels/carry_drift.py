"""Moves the rows of chunks that are not recomputed by the drift of those that are (`cacheblend.drift`), in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheblend.drift import drift_weights
from cacheblend.kernels.host_tables import empty_table, on_device
from cacheblend.kernels.layer_launch import Form, form_of
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.place_rows import Rotations
from cacheblend.ragged import places_within
from cacheblend.relocation import rotate_keys, unrotate_keys

TILE_ROWS, TILE_FIELDS = 64, 4
"""Rows that one program moves, and what tells of them."""

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [rows, kv_heads, head_dim]."""


class ChunkRange(NamedTuple):
    """One chunk: rows `left` to `left_end` (exclusive) move by what the rows `told` to `told_end` tell."""

    left: int
    left_end: int
    told: int
    told_end: int


class DriftTable(NamedTuple):
    """`DriftingRows` on the host.

    Attributes:
        chunks: what belongs together.
        columns: [..] int64 each, the attributes `of_pass` to `left_positions`.
        tiles: [tiles, 4] int64.
    """

    chunks: tuple[ChunkRange, ...]
    columns: tuple[np.ndarray, ...]
    tiles: np.ndarray

    @classmethod
    def of(cls, chunks: Sequence[ChunkRange], *rows: Sequence[np.ndarray]) -> DriftTable:
        """From chunks, in order, none without a row that tells or one that moves, and each column in pieces."""
        return cls(tuple(chunks), tuple(map(np.concatenate, rows)), _tiles(chunks))


@dataclass(frozen=True, eq=False)
class DriftingRows:
    """Which rows of a forward pass tell a drift and which rows of the pages move by it, chunk after chunk.

    Rows that tell are those of the pass and, of a prompt whose beginning an earlier blend has computed, more rows.

    Attributes:
        chunks: what belongs together.
        of_pass: [p] int64, indices among the rows of the pass of those that tell.
        of_pass_slots: [p] int64, where each one's stored KV is.
        of_pass_at: [p] int64, its place among all that tell.
        told_positions: [m] int64, of all that tell.
        left_slots: [n] int64, where the rows are that move.
        left_positions: [n] int64, of these.
        tiles: [tiles, 4] int64, `ChunkRange`s of at most `TILE_ROWS` rows that move.
    """

    chunks: tuple[ChunkRange, ...]
    of_pass: torch.Tensor
    of_pass_slots: torch.Tensor
    of_pass_at: torch.Tensor
    told_positions: torch.Tensor
    left_slots: torch.Tensor
    left_positions: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, table: DriftTable) -> DriftingRows:
        """One copy to the device."""
        columns = [*table.columns, table.tiles.ravel()]
        host = empty_table(sum(map(len, columns)), device=device)
        np.concatenate(columns, out=host.numpy())
        placed = on_device(host, device).split([len(column) for column in columns])
        of_pass, slots, at, told_positions, left_slots, left_positions, tiles = placed
        return cls(
            table.chunks, of_pass, slots, at, told_positions, left_slots, left_positions, tiles.view(-1, TILE_FIELDS)
        )

    def cut(self, of_pass: int, told: int, tiles: int) -> DriftingRows:
        """The first of these, where the others are only room for more."""
        return replace(
            self,
            of_pass=self.of_pass[:of_pass],
            of_pass_slots=self.of_pass_slots[:of_pass],
            of_pass_at=self.of_pass_at[:of_pass],
            told_positions=self.told_positions[:told],
            tiles=self.tiles[:tiles],
        )

    @cached_property
    def not_of_pass(self) -> torch.Tensor:
        """[m - p] int64, places of the rows that tell and are not of the pass."""
        others = torch.ones(len(self.told_positions), dtype=torch.bool, device=self.of_pass_at.device)
        others[self.of_pass_at] = False
        return others.nonzero().flatten()

    @cached_property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Of each chunk, [rows that move, rows that tell] float32 (`drift_weights`); the same in every layer."""
        return tuple(
            drift_weights(self.left_positions[c.left : c.left_end], self.told_positions[c.told : c.told_end])
            for c in self.chunks
        )


class DriftPass:
    """Moves rows of every layer's pages beside one forward pass, by a Triton kernel.

    Its floor is its bytes: keys and values of the rows that tell are read twice, of those that move read and written.

    Args:
        rows: what tells and what moves, on a GPU.
        rotations: of the model.
    """

    def __init__(self, rows: DriftingRows, rotations: Rotations) -> None:
        self._rows = rows
        self._rotations = rotations
        self._form: Form | None = None
        self._launches: Any = None

    def move(self, keys: torch.Tensor, values: torch.Tensor, layer: PagedLayer, more: KeysValues | None = None) -> None:
        """One layer's rows, before the new KV is written to its pages.

        Args:
            keys: [rows, kv_heads, head_dim] of the pass, new, rotated; last stride 1.
            values: as `keys`.
            layer: its pages, which hold stored KV.
            more: drift of the rows that tell and are not of the pass, in order, each [m - p, kv_heads, head_dim]
                float32: of keys before rotation and of values.
        """
        form = form_of(keys, values, layer.keys, layer.values)
        if form != self._form:
            # Here, for triton is not installed where there is no GPU.
            from cacheblend.kernels.carry_drift_triton import DriftLaunches

            self._launches = DriftLaunches(keys, values, layer, self._rows, self._rotations)
            self._form = form
        self._launches(keys, values, layer, more)


def moved_rows(
    rows: DriftingRows,
    turns: tuple[KeysValues, KeysValues],
    scaling: float,
    new: KeysValues,
    stored: KeysValues,
    left: KeysValues,
    more: KeysValues | None = None,
) -> KeysValues:
    """What the kernel must equal: the rows that move, where they have moved to.

    Args:
        rows: what tells and what moves.
        turns: (cos, sin) of the model's rotary tables, each [.., head_dim] float32, at `rows.told_positions` and at
            `rows.left_positions`.
        scaling: the factor the tables carry.
        new: of the rows of the pass that tell, keys rotated.
        stored: of the same rows.
        left: stored, of the rows that move.
        more: see `DriftPass.move`.

    Returns:
        As `left`, in its dtype; everything is computed in float32.
    """
    of_keys, of_values = (n.float() - s.float() for n, s in zip(new, stored, strict=True))
    (cos, sin), left_turn = turns
    plain = unrotate_keys(of_keys, lambda at: (cos[at], sin[at]), rows.of_pass_at, scaling)
    more_keys, more_values = more or (None, None)
    drifts = torch.stack([_told(rows, plain, more_keys), _told(rows, of_values, more_values)])
    shifts = torch.empty(2, *left[0].shape, dtype=torch.float32, device=left[0].device)
    for chunk, weights in zip(rows.chunks, rows.weights, strict=True):
        moving, telling = slice(chunk.left, chunk.left_end), slice(chunk.told, chunk.told_end)
        torch.matmul(weights, drifts[:, telling].flatten(2), out=shifts[:, moving].flatten(2))
    turned = rotate_keys(shifts[0], *left_turn)
    return (left[0].float() + turned).to(left[0].dtype), (left[1].float() + shifts[1]).to(left[1].dtype)


def _told(rows: DriftingRows, of_pass: torch.Tensor, more: torch.Tensor | None) -> torch.Tensor:
    """Everybody's drift in order."""
    told = of_pass.new_empty(len(rows.told_positions), *of_pass.shape[1:])
    told[rows.of_pass_at] = of_pass
    if more is not None:
        told[rows.not_of_pass] = more
    return told


def _tiles(chunks: Sequence[ChunkRange]) -> np.ndarray:
    of_chunks = np.array(chunks, dtype=np.int64).reshape(-1, TILE_FIELDS)
    left, left_end = of_chunks[:, 0], of_chunks[:, 1]
    counts = -((left - left_end) // TILE_ROWS)
    tiles = np.repeat(of_chunks, counts, axis=0)
    tiles[:, 0] += places_within(counts) * TILE_ROWS
    tiles[:, 1] = np.minimum(tiles[:, 0] + TILE_ROWS, tiles[:, 1])
    return tiles
