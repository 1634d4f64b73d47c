"""Recomputing passes of one prompt whose layers are replayed one by one, with all that they read in one table.

For passes of more rows than whole passes are captured for (`pass_graphs.py`): the device is busy for longer than Python
takes to launch a layer, but waits for what comes before the first one. So a pass is one table and one copy.
"""

from __future__ import annotations

from collections.abc import Callable

from cacheblend.kernels.carry_drift import DriftTable
from cacheblend.vllm_backend.hidden import Entering
from cacheblend.vllm_backend.layer_graphs import LayerGraphs
from cacheblend.vllm_backend.pass_layers import PassLayers
from cacheblend.vllm_backend.pass_tables import PassTables
from cacheblend.vllm_backend.rows import PromptRows


class LayerPasses:
    """Replays the layers' graphs, and attends and moves rows in between.

    Args:
        graphs: of what layers do row by row.
        layers: attend and move.
        tables: what those read.
    """

    def __init__(self, graphs: LayerGraphs, layers: PassLayers, tables: PassTables) -> None:
        self._graphs = graphs
        self._layers = layers
        self._tables = tables

    def warm_up(self) -> None:
        """Load the kernels. Call it once, before the first pass."""
        graph = self._graphs.for_rows(1)
        if graph is not None:
            self._layers.replay(graph, 0, graph.rows, None, lambda _: None)

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
            rows: of one prompt; its KV must be in its pages for every earlier position.
            drift: what moves with them, if anything does.
            before_layer: called with each layer's index before it runs.

        Returns:
            Whether there was room for it; nothing has happened if not.
        """
        count = len(rows.positions)
        graph = self._graphs.for_rows(count)
        if graph is None or not self._tables.fill(rows, None, drift, entering):
            return False
        self._layers.replay(graph, first, count, None if entering is None else entering.hidden, before_layer)
        return True
