"""How rows attend inside the model's own layers. One strategy a pass.

`RunsAttention` uses the engine's own kernel: each maximal run of consecutive positions is one sequence of a varlen
batch (query length: the run; sequence length: the run's end; block table: the prompt's). KV is written for all rows
before any attends, so the stock causal kernel applies exactly the right mask.

`RowsAttention` and `ScoringAttention` (`scoring.py`) use our own: the layer's attention module is called without
metadata, as in vLLM's profiling run (KV is written, nothing is computed), and a forward hook puts the result in its
place.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheblend.kernels.host_tables import empty_table, on_device
from cacheblend.kernels.rows_attention import RowsAttentionPass
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rows import RowBatch


class LayerRows(NamedTuple):
    """The rows of a pass where one layer attends.

    Attributes:
        layer: its index.
        pages: the layer's.
        query: [rows, heads, head_dim], rotated.
        key: [rows, kv_heads, head_dim], rotated.
        value: [rows, kv_heads, head_dim].
        scale: of the scores.
        out: [rows, heads, head_dim] contiguous, for the attention's output.
    """

    layer: int
    pages: LayerPages
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    out: torch.Tensor


class PassAttention(Protocol):
    """Attention of one pass over one batch of rows."""

    @property
    def metadata(self) -> Any:
        """What the attention layers find in vLLM's forward context; None for a strategy of our own."""
        ...

    def attend(self, rows: LayerRows) -> None:
        """Our own attention, once the rows' KV is in the pages; what is written is `rows.out`."""
        ...


class RunsAttention:
    """The engine's own kernel over runs.

    Args:
        rows: the batch.
        builder: an attention metadata builder of the engine's backend.
    """

    def __init__(self, rows: RowBatch, builder: Any) -> None:
        starts = rows.run_starts.numpy()
        edges = np.append(starts, len(rows))
        blocks = rows.block_tables_cpu.numpy()[rows.prompt_index_cpu.numpy()[starts]]
        # One copy to the device.
        parts = [edges, rows.positions_cpu.numpy()[edges[1:] - 1] + 1, blocks.ravel()]
        # Each begins where a kernel may read four at a time.
        ends = list(accumulate(-(-len(part) // 4) * 4 for part in parts))
        where = [slice(end, end + len(part)) for end, part in zip([0, *ends], parts, strict=False)]
        host = empty_table(ends[-1], device=rows.device, dtype=torch.int32)
        for at, part in zip(where, parts, strict=True):
            host.numpy()[at] = part
        query_start, seq_lens = host[where[0]], host[where[1]]
        placed = on_device(host, rows.device)
        on_gpu = [placed[at] for at in where]
        common = CommonAttentionMetadata(
            query_start_loc=on_gpu[0],
            query_start_loc_cpu=query_start,
            seq_lens=on_gpu[1],
            num_reqs=len(starts),
            num_actual_tokens=len(rows),
            max_query_len=int(np.diff(edges).max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=on_gpu[2].view(blocks.shape),
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

    def attend(self, rows: LayerRows) -> None:
        """Never called: the engine's kernel has done it."""
        raise AssertionError("the engine's own kernel attends")


class RowsAttention:
    """Our kernel for rows wherever they are: keys are read once a tile of rows, each row has its own position.

    Args:
        rows: the batch.
    """

    metadata = None

    def __init__(self, rows: RowBatch) -> None:
        tables = on_device(rows.block_tables_cpu, rows.device)
        on_host = (rows.prompt_index_cpu, rows.positions_cpu)
        self._pass = RowsAttentionPass(tables, rows.prompt_index, rows.positions, *on_host)

    def attend(self, rows: LayerRows) -> None:
        """See `PassAttention.attend`."""
        assert rows.pages.paged is not None
        self._pass.attend(rows.query, rows.pages.paged, rows.scale, rows.out)
