"""The scoring pass: fresh rows and the question over plain reuse, and a tally of what the question attends to.

The question's own KV goes to no page, for its pages are the engine's to fill later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from cacheblend.kernels.host_tables import on_device
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.rows_attention import RowsAttentionPass
from cacheblend.kernels.scoring_attention import ScoringPass, ScoringPlan
from cacheblend.vllm_backend.attention import LayerRows
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rows import PromptPages, PromptRows, RowBatch


class QuestionTally:
    """What a question pays to the rows before it, over all layers; it lasts for all pieces of a scoring pass.

    Args:
        prompt: whose.
        start, end: of the question.
        kv_heads: of this rank.
        device: of the model.

    Attributes:
        mass: [kv_heads, start] float32, softmax weights summed over tallied layers, heads and the
            question's rows so far.
    """

    def __init__(self, prompt: PromptPages, start: int, end: int, kv_heads: int, device: torch.device) -> None:
        self.prompt = prompt
        self.start = start
        self.end = end
        self.mass = torch.zeros(kv_heads, start, dtype=torch.float32, device=device)
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots: torch.Tensor | None = None

    @cached_property
    def _table(self) -> torch.Tensor:
        return on_device(self.prompt.block_ids.to(torch.int32), self.mass.device)

    def own(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, more_to_come: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The question's keys and values so far in this layer, these ones last, each [own, kv_heads, head_dim]."""
        if layer in self._own:
            before = self._own.pop(layer)
            keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
        if more_to_come:
            # What came from the layer is overwritten by the next piece.
            self._own[layer] = keys.clone(), values.clone()
        return keys, values

    def context(self, pages: LayerPages) -> tuple[PagedLayer, torch.Tensor]:
        """The prompt's pages of one layer, and its [max_blocks] int32 block table.

        Packed pages are read out first: the context as one large block.
        """
        if pages.paged is not None:
            return pages.paged, self._table
        if self._slots is None:
            self._slots = self.prompt.slots(torch.arange(self.start)).to(self._table.device)
        keys, values = pages.read(self._slots)
        return PagedLayer(keys[None].contiguous(), values[None].contiguous()), torch.zeros_like(self._table[:1])


class ScoringAttention:
    """Implements `PassAttention` for one piece of a scoring pass.

    Args:
        rows: fresh rows, and rows of the question last, of each prompt.
        tallies: of each prompt.
        first_layer: the first whose attention is tallied.
    """

    metadata = None

    def __init__(self, rows: RowBatch, tallies: Sequence[QuestionTally], first_layer: int = 0) -> None:
        self._parts = [
            _ScoredPrompt(part, where, tally, rows, first_layer)
            for (part, where), tally in zip(rows, tallies, strict=True)
        ]

    def attend(self, rows: LayerRows) -> None:
        """See `PassAttention.attend`; adds to the tallies."""
        for part in self._parts:
            part.attend(rows)


class _ScoredPrompt:
    """One prompt of a piece: what its rows see is the same in every layer."""

    def __init__(self, part: PromptRows, where: slice, tally: QuestionTally, rows: RowBatch, first_layer: int) -> None:
        fresh = int((part.positions < tally.start).sum())
        self._tally = tally
        self._first_layer = first_layer
        self._fresh = slice(where.start, where.start + fresh)
        self._asking = slice(where.start + fresh, where.stop)
        self._more_to_come = int(part.positions[-1]) + 1 < tally.end
        self._positions = rows.positions[self._fresh]
        self._positions_cpu = part.positions[:fresh]
        self._fresh_pass: RowsAttentionPass | None = None
        self._asking_pass: ScoringPass | None = None

    def attend(self, rows: LayerRows) -> None:
        """Fill this prompt's rows of the output and add to its tally."""
        paged, table = self._tally.context(rows.pages)
        fresh, asking = self._fresh, self._asking
        if fresh.start < fresh.stop:
            self._fresh_pass = self._fresh_pass or self._make_fresh_pass(table)
            self._fresh_pass.attend(rows.query[fresh], paged, rows.scale, rows.out[fresh])
        if asking.start < asking.stop:
            query = rows.query[asking]
            keys, values = self._tally.own(rows.layer, rows.key[asking], rows.value[asking], self._more_to_come)
            self._asking_pass = self._asking_pass or self._make_asking_pass(table, query, keys)
            tally = rows.layer >= self._first_layer
            self._asking_pass.attend(query, keys, values, paged, rows.scale, rows.out[asking], tally)

    def _make_fresh_pass(self, table: torch.Tensor) -> RowsAttentionPass:
        on_host = (torch.zeros_like(self._positions_cpu), self._positions_cpu)
        return RowsAttentionPass(table[None], torch.zeros_like(self._positions), self._positions, *on_host)

    def _make_asking_pass(self, table: torch.Tensor, query: torch.Tensor, keys: torch.Tensor) -> ScoringPass:
        plan = ScoringPlan.of(
            rows=len(query),
            own=len(keys),
            context=self._tally.start,
            heads=query.shape[1],
            kv_heads=keys.shape[1],
            head_dim=query.shape[2],
            dtype=query.dtype,
            device=query.device,
        )
        return ScoringPass(table, self._tally.mass, plan)
