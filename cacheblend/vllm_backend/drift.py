"""What the rows left alone move by (see `cacheblend.drift`), over vLLM's pages: for all chunks of one pass at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from cacheblend.drift import ChunkDrift, chunk_drifts
from cacheblend.plan import BlendPlan
from cacheblend.relocation import rotate_keys, unrotate_keys
from cacheblend.selectors.base import members
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rotary import RotaryTables
from cacheblend.vllm_backend.rows import PromptPages, PromptRows
from kvstore.chunk import ChunkKV

CHUNKS_TOGETHER = 16
"""Chunks that are moved with one product: bounds its float32 result."""


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

    def borders(self, positions: torch.Tensor) -> list[int]:
        """Where rows of the prompt ([n] int64 ascending positions) may be cut into passes: never within a chunk."""
        starts = torch.tensor([span.start for span in self.plan.spans])
        return sorted(set(torch.searchsorted(positions, starts).tolist()))

    @cached_property
    def chunks(self) -> list[_Chunk]:
        """Those that have rows to move; the same for every pass."""
        drifts = chunk_drifts(self.plan, self.chosen)
        return [self._chunk(drift) for drift in drifts if int(drift.left[-1]) >= self.start]

    def _chunk(self, drift: ChunkDrift) -> _Chunk:
        told, movable = self.chosen[drift.told], drift.left >= self.start
        is_old = told < self.start
        old, new, left = told[is_old], told[~is_old], drift.left[movable]
        before = None
        if len(old):
            before = _Before(old, self.pages.slots(old), self.stored[drift.span.start], old - drift.span.start)
        weights = drift.weights[movable]
        weights = torch.cat([weights[:, ~is_old], weights[:, is_old]], dim=1)
        return _Chunk(new, self.pages.slots(new), before, left, self.pages.slots(left), weights)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """One chunk's rows.

    Attributes:
        told, told_slots: [m] int64, positions and slots of the rows that are recomputed now.
        before: rows that were recomputed before; None if there are none.
        left, left_slots: [n] int64, positions and slots of the rows that move.
        weights: [n, m + rows before] float32.
    """

    told: torch.Tensor
    told_slots: torch.Tensor
    before: _Before | None
    left: torch.Tensor
    left_slots: torch.Tensor
    weights: torch.Tensor

    def rows_among(self, positions: torch.Tensor) -> torch.Tensor | None:
        """[m] int64, where `told` are among a pass's `positions` ([rows] int64 ascending); None if not all are."""
        where = members(positions, self.told).nonzero().flatten()
        return where if len(where) == len(self.told) else None


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

    def drift(
        self, layer: int, pages: LayerPages, rotary: RotaryTables, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New less stored keys (both rotated for where they are) and values, each [n, kv_heads, head_dim] float32."""
        new_keys, new_values = pages.read(self.slots.to(device))
        stored_keys, stored_values = self.chunk.kv[layer, :, self.rows.to(self.chunk.kv.device)].to(device)
        old = (self.rows + self.chunk.identity.base_position).to(device)
        placed = rotate_keys(stored_keys, *rotary.between(old, self.positions.to(device)))
        return new_keys.float() - placed.float(), new_values.float() - stored_values.float()


class PassDrift:
    """Moves rows of the pages as the rows of a pass drift.

    A chunk whose recomputed rows are in several passes is not moved: no pass knows how it drifts.

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
        moving: list[tuple[_Chunk, torch.Tensor]] = []
        for prompt, rows, first in parts:
            for chunk in prompt.chunks:
                where = chunk.rows_among(rows.positions) if len(chunk.told) else None
                if where is not None:
                    moving.append((chunk, where + first))
        moving += [(chunk, chunk.told) for prompt in alone for chunk in prompt.chunks if not len(chunk.told)]
        firsts = range(0, len(moving), CHUNKS_TOGETHER)
        self._groups = [_Group(moving[first : first + CHUNKS_TOGETHER], device) for first in firsts]

    @property
    def moves_nothing(self) -> bool:
        """Whether there is no row to move."""
        return not self._groups

    def apply(self, layer: int, pages: LayerPages, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Move one layer's rows, before the new KV is written.

        Args:
            layer: its index.
            pages: of the layer; they hold stored KV.
            keys: [rows, kv_heads, head_dim] of the pass, new, rotated.
            values: as `keys`.
        """
        for group in self._groups:
            self._move(group, layer, pages, keys, values)

    def _move(self, group: _Group, layer: int, pages: LayerPages, keys: torch.Tensor, values: torch.Tensor) -> None:
        old_keys, old_values = pages.read(group.told_slots)
        of_keys = [keys[group.told].float() - old_keys.float()]
        of_values = [values[group.told].float() - old_values.float()]
        for before in group.before:
            more_keys, more_values = before.drift(layer, pages, self._rotary, self._device)
            of_keys.append(more_keys)
            of_values.append(more_values)
        rotary = self._rotary
        plain = unrotate_keys(torch.cat(of_keys), rotary.tables, group.told_positions, rotary.scaling)
        for_keys, for_values = group.shift(torch.cat([plain, torch.cat(of_values)], dim=1)).chunk(2, dim=1)
        left_keys, left_values = pages.read(group.left_slots)
        moved_keys = left_keys.float() + rotate_keys(for_keys, *rotary.tables(group.left_positions))
        moved_values = left_values.float() + for_values
        pages.write(group.left_slots, moved_keys.to(left_keys.dtype), moved_values.to(left_values.dtype))


class _Group:
    """Chunks whose drifts are one padded batch of matrices.

    Attributes:
        told, told_slots: [m] int64, recomputed rows of the pass: index in it and slot.
        before: those that were recomputed before.
        told_positions: [m + rows before] int64, of both, in this order.
        left_slots, left_positions: [n] int64, rows that move.
    """

    def __init__(self, moving: Sequence[tuple[_Chunk, torch.Tensor]], device: torch.device) -> None:
        chunks = [chunk for chunk, _ in moving]
        self.before = [chunk.before for chunk in chunks if chunk.before is not None]
        left = max(len(chunk.left) for chunk in chunks)
        told = max(chunk.weights.shape[1] for chunk in chunks)
        # Rows beyond a chunk's own have weight zero, wherever they point.
        weights = torch.zeros(len(chunks), left, told)
        gather = torch.zeros(len(chunks), told, dtype=torch.int64)
        scatter = []
        first, first_before = 0, sum(len(chunk.told) for chunk in chunks)
        for index, chunk in enumerate(chunks):
            rows, columns = chunk.weights.shape
            weights[index, :rows, :columns] = chunk.weights
            last, last_before = first + len(chunk.told), first_before + columns - len(chunk.told)
            gather[index, :columns] = torch.cat([torch.arange(first, last), torch.arange(first_before, last_before)])
            scatter.append(torch.arange(rows) + index * left)
            first, first_before = last, last_before

        def on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat(list(tensors)).to(device)

        self.told = on_device([where for _, where in moving])
        self.told_slots = on_device([chunk.told_slots for chunk in chunks])
        in_pass = [chunk.told for chunk in chunks]
        self.told_positions = on_device([*in_pass, *(before.positions for before in self.before)])
        self.left_slots = on_device([chunk.left_slots for chunk in chunks])
        self.left_positions = on_device([chunk.left for chunk in chunks])
        self._weights, self._gather = weights.to(device), gather.to(device)
        self._scatter = on_device(scatter)

    def shift(self, drift: torch.Tensor) -> torch.Tensor:
        """[n, heads, head_dim] float32 of the rows that move, from [m + before, heads, head_dim] of those that tell."""
        batch = drift.flatten(1)[self._gather]
        return torch.bmm(self._weights, batch).flatten(0, 1)[self._scatter].unflatten(1, drift.shape[1:])
