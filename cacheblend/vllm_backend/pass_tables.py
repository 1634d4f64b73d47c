"""What a pass over rows of one prompt reads, in one table at an address that stays, as CUDA graphs need it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheblend.kernels.carry_drift import TILE_FIELDS, TILE_ROWS, DriftingRows, DriftTable
from cacheblend.kernels.host_tables import bring, empty_table
from cacheblend.kernels.row_tiles import (
    MERGE_FIELDS,
    NO_PART,
    WORK_FIELDS,
    Division,
    divide_rows_alone,
    most_tiles,
    tile_config,
)
from cacheblend.kernels.row_tiles import processors as processors_of
from cacheblend.kernels.scoring_attention import MOST_PARTS, ScoringPlan, ScoringRoom
from cacheblend.vllm_backend.hidden import Entering
from cacheblend.vllm_backend.rows import NO_SLOT, PromptRows
from cacheblend.vllm_backend.scoring import QuestionTally

PARTIAL_RESULTS = 8192
"""Partial results of a kv head that a question may leave: 64 rows of four heads each in 32 parts."""
MOVED_ROWS, MOVED_CHUNKS = 16384, 64
"""Rows that may move with those that are recomputed, and the chunks these belong to."""


@dataclass(frozen=True)
class Heads:
    """The attention of a model, on one rank.

    Attributes:
        query: query heads.
        kv: key/value heads.
        dim: elements of a head.
        dtype: of queries, keys and values.
    """

    query: int
    kv: int
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class PassRoom:
    """What the tables of a pass have room for.

    Attributes:
        rows: of the pass.
        positions: of a prompt.
        partial_results: of a kv head that a question may leave; 0 where no rows ask.
        moved_rows: that move with those of the pass; 0 where none do.
        moved_chunks: that these belong to.
    """

    rows: int
    positions: int
    partial_results: int = 0
    moved_rows: int = 0
    moved_chunks: int = MOVED_CHUNKS

    @property
    def moved_tiles(self) -> int:
        """Tiles that the rows that move are divided into."""
        return -(-self.moved_rows // TILE_ROWS) + self.moved_chunks if self.moved_rows else 0


class Extent(NamedTuple):
    """How much of the tables a pass fills.

    Attributes:
        items: of `work`.
        merges: of `merges`.
        parts: partial results that these merge.
        telling: rows of the pass that tell a drift.
        told: all rows that do.
        tiles: of the rows that move.
    """

    items: int
    merges: int
    parts: int
    telling: int
    told: int
    tiles: int


class PassTables:
    """The table, and what it has room for.

    Rows that a pass has less than the graph have no slot, and work items, merges and tiles that it has less have no
    rows: the kernels do nothing for them.

    Args:
        heads: of the model.
        room: for one pass.
        block_size: positions of a block.
        device: of the model.

    Attributes:
        heads: see above.
        room: see above.
        token_ids, positions, slots: [rows] int64.
        entering: [rows] int64, which rows of what left the layer before enter a pass that begins at a later one.
        block_table: [blocks] int32, the prompt's.
        sizes: [5] int32, `ScoringPlan.sizes` of the question.
        work: [items, 6] int32, as `RowTiles.work`, of the rows that do not ask.
        merges: [merges, 4] int32, as `RowTiles.merges`.
        drifting: rows that tell a drift, and rows that move by it.
        config: block sizes of the attention of rows that do not ask.
        scoring: for a question's heads and block sizes.
        scoring_room: for a question's sizes.
        whole: all that there is room for.
        filled: what the last pass fills.
    """

    def __init__(self, heads: Heads, room: PassRoom, block_size: int, device: torch.device) -> None:
        group = heads.query // heads.kv
        self.heads = heads
        self.room = room
        self._device = device
        self._processors = processors_of(device)
        self.config = tile_config(heads.dtype, heads.dim, group, device)
        self.scoring = self._plan(0, 0)
        most_items, most_merges = most_tiles(room.rows, group, heads.kv, self.config, self._processors)
        programs = room.partial_results // self.scoring.attend.block_m + MOST_PARTS
        self.scoring_room = ScoringRoom(room.rows * group, room.partial_results, programs, room.positions)
        blocks = -(-room.positions // block_size)
        self._small = _cut(len(self.scoring.sizes()), blocks, most_items * WORK_FIELDS, most_merges * MERGE_FIELDS)
        telling = room.rows if room.moved_rows else 0
        # What moves comes last: it is the most, and not brought where nothing does.
        self._wide = _Wide(
            *_cut(
                *[room.rows] * 4,
                -(-self._small[-1].stop // 2),
                *[telling] * 4,
                room.moved_tiles * TILE_FIELDS,
                *[room.moved_rows] * 2,
            )
        )
        self._without_moved = self._wide.left_slots.start
        self.whole = Extent(most_items, most_merges, most_items, telling, telling, room.moved_tiles)
        self.filled = Extent(0, 0, 0, 0, 0, 0)
        self._empty = self._make_empty()
        self._table = torch.zeros(self._wide.left.stop, dtype=torch.int64, device=device)
        self._table[: self._without_moved] = torch.from_numpy(self._empty)
        wide = self._wide.of(self._table)
        self.token_ids, self.positions, self.slots = wide.token_ids, wide.positions, wide.slots
        self.entering = wide.entering
        flat = wide.small.view(torch.int32)
        self.sizes, self.block_table, work, merges = (flat[field] for field in self._small)
        self.work, self.merges = work.view(-1, WORK_FIELDS), merges.view(-1, MERGE_FIELDS)
        told = (wide.of_pass, wide.told_slots, wide.told_at, wide.told)
        self.drifting = DriftingRows((), *told, wide.left_slots, wide.left, wide.tiles.view(-1, TILE_FIELDS))

    def fill(
        self,
        rows: PromptRows,
        tally: QuestionTally | None = None,
        drift: DriftTable | None = None,
        entering: Entering | None = None,
    ) -> bool:
        """Bring a pass to the device, for what is queued on the current stream afterwards.

        Args:
            rows: of one prompt, those of a question last.
            tally: of the question, if any of the rows ask.
            drift: what moves with the rows, if anything does.
            entering: what enters the pass, if that is not the model's first layer.

        Returns:
            Whether there was room, and the whole question among the rows; nothing has changed if not.
        """
        places = rows.positions.numpy()
        plan = self.scoring if tally is None else self._plan(tally.end - tally.start, tally.start)
        if not self._takes(places, plan) or (drift is not None and not self._moves(drift)):
            return False
        count, asking = len(places), plan.rows
        # A copy that is under way reads the one before.
        host = empty_table(len(self._table), device=self._device)
        table = host.numpy()
        table[: self._without_moved] = self._empty
        wide = self._wide.of(table)
        wide.token_ids[:count] = rows.prompt.ids_at(places)
        wide.positions[:count] = places
        wide.slots[:count] = rows.slots().numpy()
        if entering is not None:
            wide.entering[:count] = entering.index
        flat = wide.small.view(np.int32)
        sizes, blocks, work, merges = (flat[field] for field in self._small)
        if asking:
            sizes[:] = plan.sizes(count - asking)
        reached = min(len(blocks), len(rows.prompt.block_ids))
        blocks[:reached] = rows.prompt.block_ids.numpy()[:reached]
        divided = self._divide(places[: count - asking], work, merges)
        moving = (0, 0, 0) if drift is None else (len(drift.columns[0]), len(drift.columns[3]), len(drift.tiles))
        self.filled = Extent(len(divided.work), len(divided.merges), divided.parts, *moving)
        brought = self._without_moved
        if drift is not None:
            columns = (wide.of_pass, wide.told_slots, wide.told_at, wide.told, wide.left_slots, wide.left, wide.tiles)
            for column, filled in zip(columns, (*drift.columns, drift.tiles.ravel()), strict=True):
                column[: len(filled)] = filled
            brought = len(table)
        bring(host[:brought], self._table[:brought])
        return True

    def _takes(self, places: np.ndarray, plan: ScoringPlan) -> bool:
        """Whether there is room for rows at `places`, and the question of `plan` is whole and last among them."""
        if len(places) > self.room.rows or not self.scoring_room.holds(plan):
            return False
        fresh, end = len(places) - plan.rows, plan.context + plan.rows
        return not plan.rows or (int(np.searchsorted(places, plan.context)) == fresh and int(places[-1]) == end - 1)

    def _moves(self, drift: DriftTable) -> bool:
        """Whether there is room for what moves."""
        return len(drift.columns[-1]) <= self.room.moved_rows and len(drift.tiles) <= self.room.moved_tiles

    def _divide(self, places: np.ndarray, work: np.ndarray, merges: np.ndarray) -> Division:
        heads = self.heads
        division = divide_rows_alone(places, heads.query // heads.kv, heads.kv, self.config, self._processors)
        for table, filled in ((work, division.work), (merges, division.merges)):
            table[: filled.size] = filled.ravel()
        return division

    def _plan(self, rows: int, context: int) -> ScoringPlan:
        heads = self.heads
        return ScoringPlan.of(
            rows=rows,
            own=rows,
            context=context,
            heads=heads.query,
            kv_heads=heads.kv,
            head_dim=heads.dim,
            dtype=heads.dtype,
            device=self._device,
        )

    def _make_empty(self) -> np.ndarray:
        """[n] int64, the table of a pass without rows, up to what moves."""
        table = np.zeros(self._without_moved, dtype=np.int64)
        wide = self._wide.of(table)
        wide.slots[:] = wide.told_slots[:] = NO_SLOT
        wide.small.view(np.int32)[self._small[2]].reshape(-1, WORK_FIELDS)[:, -1] = NO_PART
        return table


class _Wide(NamedTuple):
    """Where the int64 fields of a table lie, or the fields themselves; `small` holds the int32 ones."""

    token_ids: Any
    positions: Any
    slots: Any
    entering: Any
    small: Any
    of_pass: Any
    told_slots: Any
    told_at: Any
    told: Any
    tiles: Any
    left_slots: Any
    left: Any

    def of(self, table: Any) -> _Wide:
        """The fields of a table."""
        return _Wide(*(table[field] for field in self))


def _cut(*lengths: int) -> list[slice]:
    """Fields of these lengths, one behind another."""
    return [slice(first, end) for first, end in pairwise(accumulate(lengths, initial=0))]
