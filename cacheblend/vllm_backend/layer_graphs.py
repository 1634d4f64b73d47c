"""CUDA graphs of what a decoder layer does row by row, so that passes of few rows do not wait for Python.

A layer is two series of kernels around its attention: norm, projections and rotation before it; output projection,
norm and feed-forward behind it. Both are captured at start, for a few numbers of rows, while the layer itself is
called: the first capture ends where the layer calls its attention module, the second begins there. Attention stays
outside, for its work depends on the rows' positions.

All graphs share one pool of memory: what a replay leaves is valid until the next replay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import weak_ref_tensor

from cacheblend.vllm_backend.hidden import Hidden

SIZES = (16, 32, *range(64, 128, 32), *range(128, 1024, 64), *range(1024, 2049, 128))
"""Numbers of rows that are captured, up to the setting `graph_rows`; passes between two take the larger one."""


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """One layer at one number of rows.

    Attributes:
        before: from what enters the layer to its query, keys and values.
        after: from the attention's output to what leaves the layer.
        entering: what `before` reads; it may be overwritten.
        query, key, value: what `before` leaves, [rows, heads, head_dim] each with its own heads, rotated.
        leaving: what `after` leaves; the next layer's `entering`.
    """

    before: torch.cuda.CUDAGraph
    after: torch.cuda.CUDAGraph
    entering: Hidden
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    leaving: Hidden


@dataclass(frozen=True, eq=False)
class RowsGraph:
    """All layers at one number of rows.

    Attributes:
        rows: how many.
        positions: [rows] int64, what the layers read.
        attended: [rows, heads * head_dim], what they take for their attention's output.
        layers: in order.
    """

    rows: int
    positions: torch.Tensor
    attended: torch.Tensor
    layers: tuple[LayerGraph, ...]

    def enter(self, layer: int, hidden: Hidden, positions: torch.Tensor, index: torch.Tensor | None = None) -> None:
        """Put rows before `layer`: those of `hidden` at `index` or all, at most `rows`; `positions` [as many] int64."""
        self.positions[: len(positions)].copy_(positions)
        self.layers[layer].entering.overwrite(hidden, index)


class LayerGraphs:
    """The graphs for several numbers of rows.

    Args:
        layers: the model's decoder layers.
        attention: the attention module of each.
        hidden_size: of the model.
        most_rows: the largest pass that is to be replayed.
        dtype: of the hidden states.
        device: a GPU.

    Attributes:
        pool: of the graphs' memory.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        attention: Sequence[Any],
        hidden_size: int,
        most_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._attention = attention
        self._sizes = [size for size in SIZES if size <= most_rows]
        self._graphs: list[RowsGraph] = []
        largest = max(self._sizes, default=0)
        width = attention[0].num_heads * attention[0].head_size
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._embedded = torch.zeros(largest, hidden_size, dtype=dtype, device=device)
        self._attended = torch.zeros(largest, width, dtype=dtype, device=device)
        self._device = device
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self) -> None:
        """Capture every size, the largest first so that the others fit into its memory. Call it once.

        The caller's forward context and kernel choices are those that the graphs keep.
        """
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream), no_collection():
            for rows in reversed(self._sizes):
                self._warm_up(rows)
                self._graphs.insert(0, self._capture_rows(rows))
        torch.cuda.synchronize(self._device)

    @property
    def most_rows(self) -> int:
        """The largest number of rows that is captured; 0 if none is."""
        return max(self._sizes, default=0)

    def for_rows(self, rows: int) -> RowsGraph | None:
        """The smallest graph that takes `rows` rows; None if they are more than any."""
        return next((graph for graph in self._graphs if graph.rows >= rows), None)

    def _warm_up(self, rows: int) -> None:
        """Load the kernels and make the libraries' workspaces, which must not happen in a capture."""
        attended = self._attended[:rows]
        hidden = Hidden(self._embedded[:rows], None)
        for layer, module in zip(self._layers[:2], self._attention, strict=False):
            with attending(module, lambda *_: attended):
                hidden = Hidden(*layer(self._positions[:rows], hidden.states, hidden.residual))
        torch.cuda.current_stream(self._device).synchronize()

    def _capture_rows(self, rows: int) -> RowsGraph:
        positions, attended = self._positions[:rows], self._attended[:rows]
        hidden = Hidden(self._embedded[:rows], None)
        captured = []
        for layer, module in zip(self._layers, self._attention, strict=True):
            graph, hidden = self._capture_layer(layer, module, positions, attended, hidden)
            captured.append(graph)
        return RowsGraph(rows, positions, attended, tuple(captured))

    def _capture_layer(
        self, layer: Any, module: Any, positions: torch.Tensor, attended: torch.Tensor, hidden: Hidden
    ) -> tuple[LayerGraph, Hidden]:
        before, after = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        found: list[torch.Tensor] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
            before.capture_end()
            found.extend((query, key, value))
            begin_capture(after, self.pool)
            return attended

        with attending(module, attend):
            begin_capture(before, self.pool)
            leaving = Hidden(*layer(positions, hidden.states, hidden.residual))
            after.capture_end()
        query, key, value = (weak_ref_tensor(t).view(len(positions), -1, module.head_size) for t in found)
        return LayerGraph(before, after, weak(hidden), query, key, value, weak(leaving)), leaving


def begin_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Capture what this thread does from here on; other threads (of the store, of the engine) may use the device."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: what it frees on the device would break a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def weak(hidden: Hidden) -> Hidden:
    """The same memory without keeping it from the graphs that are captured next."""
    residual = None if hidden.residual is None else weak_ref_tensor(hidden.residual)
    return Hidden(weak_ref_tensor(hidden.states), residual)


@contextmanager
def attending(module: Any, attend: Any) -> Iterator[None]:
    """While it lasts, calling the attention module calls `attend`."""
    module.forward = attend
    try:
        yield
    finally:
        del module.forward
