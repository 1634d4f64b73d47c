"""A pass over rows of one prompt through the model's layers, all that differs from pass to pass read from tables.

The kernels, and how they divide the work, are those of any pass; only that they read from `PassTables` how much there
is of it. So a CUDA graph may hold the pass (`pass_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.place_rows import Rotations
from cacheblend.kernels.row_tiles import RowTiles
from cacheblend.vllm_backend.hidden import Hidden
from cacheblend.vllm_backend.layer_graphs import RowsGraph, attending
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.pass_tables import Extent, PassTables


@dataclass(frozen=True, eq=False)
class Stack:
    """What a pass goes through.

    Attributes:
        embed: from [rows] int64 token ids to [rows, hidden].
        layers: the model's decoder layers.
        attention: the attention module of each.
        pages: of each, strided views.
        first_tallied: the first layer whose attention is tallied.
        rotations: of the model.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    layers: Sequence[Any]
    attention: Sequence[Any]
    pages: Sequence[LayerPages]
    first_tallied: int
    rotations: Rotations


class _LayerTensors(NamedTuple):
    """What the kernels of a layer are launched on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    paged: PagedLayer
    scale: float

    @property
    def form(self) -> object:
        """All that kernels depend on which tables do not tell."""
        tensors = (self.query, self.key, self.value, self.paged.keys, self.paged.values)
        return (*((t.stride(), t.data_ptr() % 16) for t in tensors), self.scale)


class _LastReached(Exception):
    """Ends the last layer: nothing reads what leaves it."""


class PassLayers:
    """The layers, over the rows of `tables`.

    Args:
        stack: the model.
        tables: what is read.
        device: of the model.

    Attributes:
        mass: [kv_heads, positions] float32, what the question pays to each position before it is added to it.
    """

    def __init__(self, stack: Stack, tables: PassTables, device: torch.device) -> None:
        self._stack = stack
        self._tables = tables
        self.mass = torch.zeros(tables.heads.kv, tables.room.positions, dtype=torch.float32, device=device)
        width = tables.heads.query * tables.heads.dim
        self._attended = torch.zeros(tables.room.rows, width, dtype=tables.heads.dtype, device=device)
        self._kernels: dict[object, _Kernels] = {}

    @property
    def count(self) -> int:
        """Layers of the model."""
        return len(self._stack.layers)

    def run(self, layers: range, rows: int, hidden: Hidden | None) -> Hidden | None:
        """Some layers, over the first rows of the tables.

        Args:
            layers: consecutive ones.
            rows: how many, at least those that the tables tell of.
            hidden: what enters the first of them; None before the model's first.

        Returns:
            What leaves the last of them; None behind the model's last, which ends where nothing reads what follows.
        """
        stack, positions = self._stack, self._tables.positions[:rows]
        # One set for all numbers of rows, which the tables tell.
        kernels_for = partial(self._kernels_for, self._kernels, self._tables.whole)
        if hidden is None:
            hidden = Hidden(stack.embed(self._tables.token_ids[:rows]), None)
        for index in layers:
            try:
                with attending(stack.attention[index], self._attend(index, self._attended[:rows], kernels_for)):
                    hidden = Hidden(*stack.layers[index](positions, hidden.states, hidden.residual))
            except _LastReached:
                return None
        return hidden

    def replay(
        self, graph: RowsGraph, first: int, rows: int, entering: Hidden | None, before_layer: Callable[[int], None]
    ) -> None:
        """From one layer to the model's last, over the first rows of the tables.

        Args:
            graph: of at least so many rows: what a layer does row by row.
            first: index of a layer.
            rows: how many, at least those that the tables tell of.
            entering: of its rows those enter that the tables tell; None before the model's first.
            before_layer: called with each layer's index before it runs.
        """
        tables = self._tables
        if entering is None:
            embedded = Hidden(self._stack.embed(tables.token_ids[:rows]), None)
            graph.enter(first, embedded, tables.positions[:rows])
        else:
            graph.enter(first, entering, tables.positions[:rows], tables.entering[:rows])
        # Programs that find nothing to do in the tables take time as well: here no graph needs them.
        kernels_for = partial(self._kernels_for, {}, self._tables.filled)
        for index in range(first, self.count):
            before_layer(index)
            layer = graph.layers[index]
            layer.before.replay()
            attend = self._attend(index, graph.attended[:rows], kernels_for)
            try:
                attend(layer.query[:rows], layer.key[:rows], layer.value[:rows])
            except _LastReached:
                return
            layer.after.replay()

    def _attend(
        self, index: int, attended: torch.Tensor, kernels_for: Callable[[_LayerTensors], _Kernels]
    ) -> Callable[..., torch.Tensor]:
        """The attention of a layer over its pages, as the layer calls it; `attended` is filled and given back."""
        pages, module = self._stack.pages[index], self._stack.attention[index]
        paged = pages.paged
        assert paged is not None
        rows = len(attended)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
            query, key, value = (t.view(rows, -1, module.head_size) for t in (query, key, value))
            out, is_last = attended.view(query.shape), index == self.count - 1
            kernels = kernels_for(_LayerTensors(query, key, value, paged, module.impl.scale))
            if kernels.drift is not None:
                kernels.drift(key, value, paged, None)
            pages.write(self._tables.slots[:rows], key, value)
            if not is_last or kernels.question is not None:
                kernels.rows(query, paged, out)
            if kernels.question is not None:
                kernels.question(query, key, value, paged, out, index >= self._stack.first_tallied)
            if is_last:
                raise _LastReached
            return attended

        return attend

    def _kernels_for(self, made: dict[object, _Kernels], extent: Extent, layer: _LayerTensors) -> _Kernels:
        """Those that were made for layers of this form, or new ones."""
        form = layer.form
        if form not in made:
            made[form] = self._make_kernels(extent, *layer)
        return made[form]

    def _make_kernels(
        self,
        extent: Extent,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        paged: PagedLayer,
        scale: float,
    ) -> _Kernels:
        # Here, for triton is not installed where there is no GPU.
        from cacheblend.kernels.carry_drift_triton import DriftLaunches
        from cacheblend.kernels.rows_attention_triton import RowsLaunches
        from cacheblend.kernels.scoring_attention_triton import ScoringLaunches

        tables = self._tables
        tiles = RowTiles(
            work=tables.work[: extent.items],
            merges=tables.merges[: extent.merges],
            parts=extent.parts,
            rows=len(query),
            requests=1,
            reach=len(tables.block_table) * paged.block_size,
            group=query.shape[1] // paged.kv_heads,
            config=tables.config,
        )
        of_question = (paged, tables.block_table, scale, self.mass, tables.scoring, tables.sizes, tables.scoring_room)
        drifting = tables.drifting.cut(extent.telling, extent.told, extent.tiles)
        return _Kernels(
            RowsLaunches(query, paged, tables.block_table[None], tables.positions, scale, tiles),
            ScoringLaunches(query, key, value, *of_question) if tables.room.partial_results else None,
            DriftLaunches(key, value, paged, drifting, self._stack.rotations) if extent.tiles else None,
        )


@dataclass(frozen=True, eq=False)
class _Kernels:
    """The attention of the rows that do not ask, that of those that do, and what moves with them; None for neither."""

    rows: Any
    question: Any | None
    drift: Any | None
