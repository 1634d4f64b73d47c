"""What the rows left alone move by (see `cacheblend.drift`), over vLLM's pages: for all chunks of one pass at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cacheblend.drift import ChunkRows, chunk_rows
from cacheblend.kernels.carry_drift import ChunkRange, DriftingRows, DriftPass, DriftTable, KeysValues, moved_rows
from cacheblend.plan import BlendPlan
from cacheblend.relocation import rotate_keys, unrotate_keys
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rotary import RotaryTables
from cacheblend.vllm_backend.rows import PromptPages, PromptRows
from kvstore.chunk import ChunkKV


@dataclass(frozen=True, eq=False)
class DriftingPrompt:
    """A prompt whose rows left alone move with the others.

    Attributes:
        plan: its.
        pages: its.
        chosen: [n] int64 ascending on the CPU, reusable rows that are recomputed, those before `start` too.
        start: rows before it are in the pages for good: what was recomputed of them tells, but nothing is moved.
        stored: by a reused span's start, its chunk.
    """

    plan: BlendPlan
    pages: PromptPages
    chosen: torch.Tensor
    start: int
    stored: Mapping[int, ChunkKV]

    def together(self, positions: torch.Tensor) -> list[tuple[int, int]]:
        """Which of the prompt's rows ([n] int64 ascending positions) one pass must have: those that tell of one chunk.

        Returns:
            From one index to another (exclusive), ascending.
        """
        edges = [(chunk.told[0], chunk.told[-1] + 1) for chunk in self.chunks if len(chunk.told)]
        return [(first, last) for first, last in np.searchsorted(positions.numpy(), edges).reshape(-1, 2).tolist()]

    @cached_property
    def chunks(self) -> list[_Chunk]:
        """Those that have rows to move; the same for every pass."""
        slots, rows = self.pages.all_slots.numpy(), chunk_rows(self.plan, self.chosen.numpy())
        return [self._chunk(chunk, slots) for chunk in rows if chunk.left[-1] >= self.start]

    def _chunk(self, rows: ChunkRows, slots: np.ndarray) -> _Chunk:
        start, span, told, left, before = self.start, rows.span, rows.told, rows.left, None
        if start > span.start:
            cut = int(np.searchsorted(told, start))
            if cut:
                old = torch.from_numpy(told[:cut])
                before = _Before(old, self.pages.slots(old), self.stored[span.start], old - span.start)
            told, left = told[cut:], left[left >= start]
        return _Chunk(told, slots[told], before, left, slots[left])


@dataclass(frozen=True, eq=False)
class _Chunk:
    """One chunk's rows.

    Attributes:
        told, told_slots: [m] int64, positions and slots of the rows that are recomputed now.
        before: rows that were recomputed before; None if there are none.
        left, left_slots: [n] int64, positions and slots of the rows that move.
    """

    told: np.ndarray
    told_slots: np.ndarray
    before: _Before | None
    left: np.ndarray
    left_slots: np.ndarray

    def rows_among(self, positions: np.ndarray) -> np.ndarray | None:
        """[m] int64, where `told` are among a pass's `positions` ([rows] int64 ascending); None if not all are.

        No other row of a pass lies between them.
        """
        if not len(self.told) or self.told[0] < positions[0] or self.told[-1] > positions[-1]:
            return None
        first = positions.searchsorted(self.told[0])
        return np.arange(first, first + len(self.told))


@dataclass(frozen=True, eq=False)
class _Before:
    """Rows that an earlier blend of the same plan recomputed.

    Attributes:
        positions, slots: [n] int64.
        chunk: what is stored of them.
        rows: [n] int64, which of its rows they are.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    chunk: ChunkKV
    rows: torch.Tensor

    def drift(self, layer: int, pages: LayerPages, rotary: RotaryTables, device: torch.device) -> KeysValues:
        """New less stored keys, before rotation, and values, each [n, kv_heads, head_dim] float32."""
        new_keys, new_values = pages.read(self.slots.to(device))
        stored_keys, stored_values = self.chunk.kv[layer, :, self.rows.to(self.chunk.kv.device)].to(device)
        old, positions = (self.rows + self.chunk.identity.base_position).to(device), self.positions.to(device)
        placed = rotate_keys(stored_keys, *rotary.between(old, positions))
        of_keys = unrotate_keys(new_keys.float() - placed.float(), rotary.tables, positions, rotary.scaling)
        return of_keys, new_values.float() - stored_values.float()


class PassDrift:
    """Moves rows of the pages as the rows of a pass drift.

    Args:
        parts: the prompts of the pass that ask for it, with their rows in it and the index of the first of these.
        alone: prompts whose chunks without a row in any pass move as well, by what was recomputed before.
        rotary: of the model.
        device: of the model.
    """

    def __init__(
        self,
        parts: Sequence[tuple[DriftingPrompt, PromptRows, int]],
        alone: Sequence[DriftingPrompt],
        rotary: RotaryTables,
        device: torch.device,
    ) -> None:
        self._rotary = rotary
        self._device = device
        moving: list[tuple[_Chunk, np.ndarray]] = []
        for prompt, rows, first in parts:
            positions = rows.positions.numpy()
            for chunk in prompt.chunks:
                where = chunk.rows_among(positions)
                if where is not None:
                    moving.append((chunk, where + first))
        moving += [(chunk, chunk.told) for prompt in alone for chunk in prompt.chunks if not len(chunk.told)]
        self._before = [chunk.before for chunk, _ in moving if chunk.before is not None]
        self._table = _lay_out(moving) if moving else None

    @property
    def moves_nothing(self) -> bool:
        """Whether there is no row to move."""
        return self._table is None

    @property
    def of_pass_alone(self) -> DriftTable | None:
        """What moves, where only rows of the pass tell; None where rows of an earlier one do as well."""
        return None if self._before else self._table

    def apply(self, layer: int, pages: LayerPages, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Move one layer's rows, before the new KV is written.

        Args:
            layer: its index.
            pages: of the layer; they hold stored KV.
            keys: [rows, kv_heads, head_dim] of the pass, new, rotated.
            values: as `keys`.
        """
        rows, more = self._rows, self._drift_before(layer, pages)
        if rows.tiles.is_cuda and pages.paged is not None:
            self._on_gpu.move(keys, values, pages.paged, more)
            return
        stored, left = pages.read(rows.of_pass_slots), pages.read(rows.left_slots)
        new = keys[rows.of_pass], values[rows.of_pass]
        pages.write(rows.left_slots, *moved_rows(rows, self._turns, self._rotary.scaling, new, stored, left, more))

    @cached_property
    def _rows(self) -> DriftingRows:
        assert self._table is not None
        return DriftingRows.on(self._device, self._table)

    @cached_property
    def _on_gpu(self) -> DriftPass:
        return DriftPass(self._rows, self._rotary.all)

    @cached_property
    def _turns(self) -> tuple[KeysValues, KeysValues]:
        return self._rotary.tables(self._rows.told_positions), self._rotary.tables(self._rows.left_positions)

    def _drift_before(self, layer: int, pages: LayerPages) -> KeysValues | None:
        """Drift of the rows that were recomputed before, of all chunks in order; None if there are none."""
        if not self._before:
            return None
        drifts = [before.drift(layer, pages, self._rotary, self._device) for before in self._before]
        return torch.cat([of_keys for of_keys, _ in drifts]), torch.cat([of_values for _, of_values in drifts])


def drift_bytes(rows: int, kv_heads: int, head_dim: int) -> int:
    """Bytes that a GPU keeps the drift of a pass of `rows` rows in: keys and values, float32."""
    return 2 * rows * kv_heads * head_dim * torch.float32.itemsize


def _lay_out(moving: Sequence[tuple[_Chunk, np.ndarray]]) -> DriftTable:
    """One table of all chunks; a chunk's rows of the pass come before those that were recomputed before."""
    chunks: list[ChunkRange] = []
    places: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    left = told = 0
    for chunk, _ in moving:
        before = [] if chunk.before is None else [chunk.before.positions.numpy()]
        places.append(np.arange(told, told + len(chunk.told)))
        positions += [chunk.told, *before]
        left_end, told_end = left + len(chunk.left), told + len(chunk.told) + sum(map(len, before))
        chunks.append(ChunkRange(left, left_end, told, told_end))
        left, told = left_end, told_end
    return DriftTable.of(
        chunks,
        [where for _, where in moving],
        [chunk.told_slots for chunk, _ in moving],
        places,
        positions,
        [chunk.left_slots for chunk, _ in moving],
        [chunk.left for chunk, _ in moving],
    )
