"""What a pass of few rows of one prompt reads, in one table at an address that stays, as CUDA graphs need it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from cacheblend.kernels.host_tables import empty_table
from cacheblend.kernels.row_tiles import MERGE_FIELDS, NO_PART, WORK_FIELDS, divide_rows, most_tiles, tile_config
from cacheblend.kernels.row_tiles import processors as processors_of
from cacheblend.kernels.scoring_attention import MOST_PARTS, ScoringPlan, ScoringRoom
from cacheblend.vllm_backend.rows import NO_SLOT, PromptRows
from cacheblend.vllm_backend.scoring import QuestionTally

PARTIAL_RESULTS = 8192
"""Partial results of a kv head that a question may leave: 64 rows of four heads each in 32 parts."""


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


class PassTables:
    """The table, and what it has room for.

    Rows that a pass has less than the graph have no slot, and work items and merges that it has less have no rows: the
    kernels do nothing for them.

    Args:
        heads: of the model.
        most_rows: of a pass.
        positions: most positions of a prompt.
        block_size: positions of a block.
        device: of the model.
        partial_results: of a kv head that a question may leave.

    Attributes:
        heads: see above.
        most_rows: see above.
        token_ids, positions, slots: [most_rows] int64.
        block_table: [blocks] int32, the prompt's.
        sizes: [5] int32, `ScoringPlan.sizes` of the question.
        work: [items, 6] int32, as `RowTiles.work`, of the rows that do not ask.
        merges: [merges, 4] int32, as `RowTiles.merges`.
        config: block sizes of the attention of rows that do not ask.
        scoring: for a question's heads and block sizes.
        room: for a question's sizes.
    """

    def __init__(
        self,
        heads: Heads,
        most_rows: int,
        positions: int,
        block_size: int,
        device: torch.device,
        partial_results: int = PARTIAL_RESULTS,
    ) -> None:
        group = heads.query // heads.kv
        self.heads = heads
        self.most_rows = most_rows
        self._device = device
        self._processors = processors_of(device)
        self.config = tile_config(heads.dtype, heads.dim, group, device)
        self.scoring = self._plan(0, 0)
        most_items, most_merges = most_tiles(most_rows, group, heads.kv, self.config, self._processors)
        programs = partial_results // self.scoring.attend.block_m + MOST_PARTS
        self.room = ScoringRoom(most_rows * group, partial_results, programs, positions)
        blocks = -(-positions // block_size)
        ends = [
            0,
            *accumulate((len(self.scoring.sizes()), blocks, most_items * WORK_FIELDS, most_merges * MERGE_FIELDS)),
        ]
        self._fields = [slice(first, end) for first, end in pairwise(ends)]
        self._empty = self._make_empty()
        self._table = torch.from_numpy(self._empty).to(device, copy=True)
        self.token_ids, self.positions, self.slots = self._table[: 3 * most_rows].view(3, most_rows)
        flat = self._table[3 * most_rows :].view(torch.int32)
        self.sizes, self.block_table, work, merges = (flat[field] for field in self._fields)
        self.work, self.merges = work.view(-1, WORK_FIELDS), merges.view(-1, MERGE_FIELDS)

    def fill(self, rows: PromptRows, tally: QuestionTally | None) -> bool:
        """Bring a pass to the device, for what is queued on the current stream afterwards.

        Args:
            rows: of one prompt, those of a question last.
            tally: of the question, if any of the rows ask.

        Returns:
            Whether there was room, and the whole question among the rows; nothing has changed if not.
        """
        start, end = (0, 0) if tally is None else (tally.start, tally.end)
        places, plan = rows.positions.numpy(), self._plan(end - start, start)
        if not self._takes(places, plan):
            return False
        count, asking = len(places), plan.rows
        # A copy that is under way reads the one before.
        host = empty_table(len(self._empty), device=self._device)
        table = host.numpy()
        table[:] = self._empty
        told = table[: 3 * self.most_rows].reshape(3, self.most_rows)
        # A few of the prompt's ids, without making a tensor of all.
        told[0, :count] = [rows.prompt.ids[place] for place in places.tolist()]
        told[1, :count] = places
        told[2, :count] = rows.slots().numpy()
        sizes, blocks, work, merges = self._split(table)
        if asking:
            sizes[:] = plan.sizes(count - asking)
        reached = min(len(blocks), len(rows.prompt.block_ids))
        blocks[:reached] = rows.prompt.block_ids.numpy()[:reached]
        self._divide(places[: count - asking], work, merges)
        self._table.copy_(host, non_blocking=True)
        return True

    def _takes(self, places: np.ndarray, plan: ScoringPlan) -> bool:
        """Whether there is room for rows at `places`, and the question of `plan` is whole and last among them."""
        if len(places) > self.most_rows or not self.room.holds(plan):
            return False
        fresh, end = len(places) - plan.rows, plan.context + plan.rows
        return not plan.rows or (int(np.searchsorted(places, plan.context)) == fresh and int(places[-1]) == end - 1)

    def _divide(self, places: np.ndarray, work: np.ndarray, merges: np.ndarray) -> None:
        heads = self.heads
        alone = np.zeros_like(places)
        division = divide_rows(alone, places, heads.query // heads.kv, heads.kv, self.config, self._processors)
        for table, filled in ((work, division.work), (merges, division.merges)):
            table[: filled.size] = filled.ravel()

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
        """[n] int64, the table of a pass without rows."""
        table = np.zeros(3 * self.most_rows + -(-self._fields[-1].stop // 2), dtype=np.int64)
        table[2 * self.most_rows : 3 * self.most_rows] = NO_SLOT
        self._split(table)[2].reshape(-1, WORK_FIELDS)[:, -1] = NO_PART
        return table

    def _split(self, table: np.ndarray) -> list[np.ndarray]:
        """Sizes, block table, work and merges, each flat int32, of a table on the host."""
        flat = table[3 * self.most_rows :].view(np.int32)
        return [flat[field] for field in self._fields]
