"""CUDA graphs of whole passes of few rows of one prompt, attention included.

The scoring pass of a single question is a few dozen rows that go through every layer, and so may be what is recomputed:
the device is done with a layer before Python has launched the next. Here such a pass is a handful of launches, one for
each group of layers (`layer_groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend.kernels.carry_drift import DriftTable
from cacheblend.vllm_backend.hidden import Entering, Hidden
from cacheblend.vllm_backend.layer_graphs import begin_capture, no_collection, weak
from cacheblend.vllm_backend.layer_groups import layer_groups
from cacheblend.vllm_backend.pass_layers import PassLayers
from cacheblend.vllm_backend.pass_tables import PassTables
from cacheblend.vllm_backend.rows import PromptRows
from cacheblend.vllm_backend.scoring import QuestionTally

SCORING_SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Numbers of rows whose scoring passes are captured, up to the setting `graph_rows`."""
RECOMPUTE_SIZES = (*SCORING_SIZES, 320, 384, 448, 512)
"""The same of passes that recompute. From five hundred rows of an 8B model on, Python is the faster one on an H200."""


class PassGraphs:
    """The graphs for several numbers of rows.

    Args:
        layers: what they hold.
        tables: what those read.
        sizes: numbers of rows, ascending, that the tables have room for.
        pool: of the graphs' memory.
        device: a GPU.
    """

    def __init__(
        self, layers: PassLayers, tables: PassTables, sizes: Sequence[int], pool: Any, device: torch.device
    ) -> None:
        self._layers = layers
        self._tables = tables
        self._sizes = sizes
        self._pool = pool
        self._device = device
        self._groups = layer_groups(layers.count)
        self._starts = {group.first: index for index, group in enumerate(self._groups)}
        self._graphs: dict[int, list[_GroupGraph]] = {}

    def capture(self) -> None:
        """Capture every size, the largest first so that the others fit into its memory. Call it once.

        The caller's forward context and kernel choices are those that the graphs keep.
        """
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream), no_collection():
            for rows in reversed(self._sizes):
                # Kernels are compiled and loaded here, which must not happen in a capture; the tables are empty yet.
                self._layers.run(range(self._layers.count), rows, None)
                stream.synchronize()
                self._graphs[rows] = self._capture_rows(rows)
        torch.cuda.synchronize(self._device)

    def score(self, rows: PromptRows, tally: QuestionTally, before_layer: Callable[[int], None]) -> bool:
        """One pass through every layer: KV is written, and what a question pays is added to its tally.

        Args:
            rows: of one prompt, those of the question last, all of them; its KV must be in its pages for every earlier
                position.
            tally: of the question.
            before_layer: called before the layers run, with the index of the first of each group.

        Returns:
            Whether there was a graph for it; nothing has happened if not.
        """
        graphs = self._take(rows, tally)
        if graphs is None:
            return False
        mass = self._layers.mass[:, : tally.start]
        mass.zero_()
        _replay(graphs, before_layer)
        tally.mass += mass
        return True

    def recompute(
        self,
        first: int,
        entering: Entering | None,
        rows: PromptRows,
        drift: DriftTable | None,
        before_layer: Callable[[int], None],
    ) -> bool:
        """One pass through the layers from `first` on: KV is written, and rows move with it.

        Args:
            first: index of a layer.
            entering: what enters it; None before the model's first.
            rows: of one prompt; see `score`.
            drift: what moves with them, if anything does.
            before_layer: see `score`.

        Returns:
            See `score`.
        """
        index = self._starts.get(first)
        graphs = None if index is None else self._take(rows, None, drift, entering)
        if graphs is None:
            return False
        graphs = graphs[index:]
        if entering is not None:
            assert graphs[0].entering is not None
            graphs[0].entering.overwrite(entering.hidden, self._tables.entering[: len(rows.positions)])
        _replay(graphs, before_layer)
        return True

    def _take(
        self,
        rows: PromptRows,
        tally: QuestionTally | None,
        drift: DriftTable | None = None,
        entering: Entering | None = None,
    ) -> list[_GroupGraph] | None:
        """The graphs of a pass, its tables filled; None if it does not fit."""
        size = next((size for size in self._sizes if size >= len(rows.positions)), None)
        return self._graphs[size] if size is not None and self._tables.fill(rows, tally, drift, entering) else None

    def _capture_rows(self, rows: int) -> list[_GroupGraph]:
        graphs = []
        hidden: Hidden | None = None
        for group in self._groups:
            graph = torch.cuda.CUDAGraph()
            entering = None if hidden is None else weak(hidden)
            begin_capture(graph, self._pool)
            try:
                hidden = self._layers.run(range(group.first, group.first + group.layers), rows, hidden)
            finally:
                graph.capture_end()
            graphs.append(_GroupGraph(group.first, graph, entering))
        return graphs


@dataclass(frozen=True, eq=False)
class _GroupGraph:
    """A group of layers at one number of rows.

    Attributes:
        first: index of its first layer.
        graph: of all of them.
        entering: what it reads, which the group before it leaves; None where it reads token ids.
    """

    first: int
    graph: torch.cuda.CUDAGraph
    entering: Hidden | None


def _replay(graphs: Sequence[_GroupGraph], before_layer: Callable[[int], None]) -> None:
    for group in graphs:
        before_layer(group.first)
        group.graph.replay()
