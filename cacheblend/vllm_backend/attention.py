"""How rows attend inside the model's own layers. One strategy a pass.

`RunsAttention` uses the engine's own kernel: each maximal run of consecutive positions is one sequence of a varlen
batch (query length: the run; sequence length: the run's end; block table: the prompt's). KV is written for all rows
before any attends, so the stock causal kernel applies exactly the right mask.

`RowsAttention` and `ScoringAttention` use our own: the layer's attention module is called without metadata, as in
vLLM's profiling run (KV is written, nothing is computed), and a forward hook puts the result in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheblend.kernels.attention_mass import attention_with_mass, hidden_keys
from cacheblend.kernels.rows_attention import RowsAttentionPass
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rows import PromptRows, RowBatch


class PassAttention(Protocol):
    """Attention of one pass over one batch of rows."""

    @property
    def metadata(self) -> Any:
        """What the attention layers find in vLLM's forward context; None for a strategy of our own."""
        ...

    def attend(
        self,
        layer: int,
        pages: LayerPages,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Our own attention, once the rows' KV is in the pages.

        Args:
            layer: its index.
            pages: the layer's.
            query: [rows, heads, head_dim], rotated.
            key: [rows, kv_heads, head_dim], rotated.
            value: [rows, kv_heads, head_dim].
            scale: of the scores.
            out: [rows, heads, head_dim] contiguous; what is written.
        """
        ...


class RunsAttention:
    """The engine's own kernel over runs.

    Args:
        rows: the batch.
        builder: an attention metadata builder of the engine's backend.
    """

    def __init__(self, rows: RowBatch, builder: Any) -> None:
        starts = rows.run_starts
        ends = torch.cat([starts[1:], torch.tensor([len(rows)])])
        query_lens = ends - starts
        seq_lens = (rows.positions_cpu[ends - 1] + 1).to(torch.int32)
        query_start = torch.cat([starts, torch.tensor([len(rows)])]).to(torch.int32)
        device = rows.device
        common = CommonAttentionMetadata(
            query_start_loc=query_start.to(device),
            query_start_loc_cpu=query_start,
            seq_lens=seq_lens.to(device),
            num_reqs=len(starts),
            num_actual_tokens=len(rows),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=rows.block_tables_cpu[rows.prompt_index_cpu[starts]].to(device),
            slot_mapping=rows.slots,
            causal=True,
            positions=rows.positions,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        # fast_build: an ahead-of-time schedule would use buffers sized for the engine's own batches.
        self._metadata = builder.build(0, common, fast_build=True)

    @property
    def metadata(self) -> Any:
        """See `PassAttention.metadata`."""
        return self._metadata

    def attend(
        self,
        layer: int,
        pages: LayerPages,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Never called: the engine's kernel has done it."""
        raise AssertionError("the engine's own kernel attends")


class RowsAttention:
    """Our kernel for rows wherever they are: keys are read once a tile of rows, each row has its own position.

    Args:
        rows: the batch.
    """

    metadata = None

    def __init__(self, rows: RowBatch) -> None:
        tables = rows.block_tables_cpu.to(rows.device, non_blocking=True)
        on_host = (rows.prompt_index_cpu, rows.positions_cpu)
        self._pass = RowsAttentionPass(tables, rows.prompt_index, rows.positions, *on_host)

    def attend(
        self,
        layer: int,
        pages: LayerPages,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See `PassAttention.attend`."""
        assert pages.paged is not None
        self._pass.attend(query, pages.paged, scale, out)


class ScoringAttention:
    """Attention that tallies what the question's rows pay to each key. The question's own KV goes to no page.

    Args:
        rows: fresh rows, and the question's rows last, of each prompt.
        questions: where each prompt's question starts.
        tallies: for each prompt, [question's start] float32 that attention mass is added to.
        context: how the fresh rows attend: a strategy of our own over them alone; None if there are none, or if they
            attend as the question does.
    """

    metadata = None

    def __init__(
        self,
        rows: RowBatch,
        questions: Sequence[int],
        tallies: Sequence[torch.Tensor],
        context: RowsAttention | None = None,
    ) -> None:
        self._parts = [
            _ScoredPrompt(part, where, question, tally, rows.device)
            for (part, where), question, tally in zip(rows, questions, tallies, strict=True)
        ]
        self._context = context
        fresh = [torch.arange(len(rows))[part.fresh] for part in self._parts]
        self._fresh_rows = torch.cat(fresh).to(rows.device)

    def attend(
        self,
        layer: int,
        pages: LayerPages,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See `PassAttention.attend`."""
        if self._context is not None:
            attended = torch.empty_like(out[self._fresh_rows])
            self._context.attend(layer, pages, query[self._fresh_rows], key, value, scale, attended)
            out[self._fresh_rows] = attended
        for part in self._parts:
            part.attend(pages, query, key, value, scale, out, own_fresh=self._context is None)


class _ScoredPrompt:
    """One prompt of a scoring pass: what its rows see is the same in every layer."""

    def __init__(
        self, part: PromptRows, where: slice, question: int, tally: torch.Tensor, device: torch.device
    ) -> None:
        context_rows = int((part.positions < question).sum())
        self.fresh = slice(where.start, where.start + context_rows)
        self._asking = slice(where.start + context_rows, where.stop)
        self._tally = tally
        self._slots = part.prompt.slots(torch.arange(question)).to(device)
        positions = part.positions.to(device)
        self._fresh_positions, self._asking_positions = positions[:context_rows], positions[context_rows:]
        self._hidden = hidden_keys(self._asking_positions, question + len(self._asking_positions))

    def attend(
        self,
        pages: LayerPages,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        own_fresh: bool,
    ) -> None:
        """Fill this prompt's rows of `out`, the fresh ones only if `own_fresh`, and add to its tally."""
        keys, values = pages.read(self._slots)
        if own_fresh and len(self._fresh_positions):
            out[self.fresh] = attention_with_mass(query[self.fresh], keys, values, self._fresh_positions, scale)[0]
        asking = self._asking
        if len(self._asking_positions):
            keys = torch.cat([keys, key[asking]])
            values = torch.cat([values, value[asking]])
            attended = attention_with_mass(query[asking], keys, values, self._asking_positions, scale, self._hidden)
            out[asking], mass = attended
            self._tally += mass[: len(self._tally)]
