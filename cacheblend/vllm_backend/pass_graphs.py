"""CUDA graphs of whole passes of few rows of one prompt, attention included.

The scoring pass of a single question, and the rows that a plain reuse has to compute, are a few dozen rows that go
through every layer: the device is done with a layer before Python has launched the next. Here such a pass is a handful
of launches, one for each group of layers whose chunks' KV is placed together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cacheblend.vllm_backend.hidden import Hidden
from cacheblend.vllm_backend.layer_graphs import begin_capture, no_collection
from cacheblend.vllm_backend.layer_groups import layer_groups
from cacheblend.vllm_backend.pass_layers import PassLayers
from cacheblend.vllm_backend.pass_tables import PassTables
from cacheblend.vllm_backend.rows import PromptRows
from cacheblend.vllm_backend.scoring import QuestionTally

PASS_SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Numbers of rows whose whole passes are captured, up to the setting `graph_rows`."""


class PassGraphs:
    """The graphs for several numbers of rows.

    Args:
        layers: what they hold.
        tables: what those read.
        pool: of the graphs' memory.
        device: a GPU.
    """

    def __init__(self, layers: PassLayers, tables: PassTables, pool: Any, device: torch.device) -> None:
        self._layers = layers
        self._tables = tables
        self._pool = pool
        self._device = device
        self._groups = layer_groups(layers.count)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}

    def capture(self) -> None:
        """Capture every size, the largest first so that the others fit into its memory. Call it once.

        The caller's forward context and kernel choices are those that the graphs keep.
        """
        sizes = [size for size in PASS_SIZES if size <= self._tables.most_rows]
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream), no_collection():
            for rows in reversed(sizes):
                # Kernels are compiled and loaded here, which must not happen in a capture; the tables are empty yet.
                self._layers.run(range(self._layers.count), rows, None)
                stream.synchronize()
                self._graphs[rows] = self._capture_rows(rows)
        torch.cuda.synchronize(self._device)

    def run(self, rows: PromptRows, tally: QuestionTally | None, before_layer: Callable[[int], None]) -> bool:
        """One pass through every layer: KV is written, and what a question pays is added to its tally.

        Args:
            rows: of one prompt; its KV must be in its pages for every earlier position of the rows.
            tally: of the question whose rows come last, all of them; None if none of the rows ask.
            before_layer: called before the layers run, with the index of the first of each group.

        Returns:
            Whether there was a graph for it; nothing has happened if not.
        """
        size = next((size for size in sorted(self._graphs) if size >= len(rows.positions)), None)
        if size is None or not self._tables.fill(rows, tally):
            return False
        if tally is not None:
            mass = self._layers.mass[:, : tally.start]
            mass.zero_()
        for group, graph in zip(self._groups, self._graphs[size], strict=True):
            before_layer(group.first)
            graph.replay()
        if tally is not None:
            tally.mass += mass
        return True

    def _capture_rows(self, rows: int) -> list[torch.cuda.CUDAGraph]:
        graphs = []
        hidden: Hidden | None = None
        for group in self._groups:
            graph = torch.cuda.CUDAGraph()
            begin_capture(graph, self._pool)
            try:
                hidden = self._layers.run(range(group.first, group.first + group.layers), rows, hidden)
            finally:
                graph.capture_end()
            graphs.append(graph)
        return graphs
