"""Which rows of a prompt run through which layer, while a selector is still choosing."""

from __future__ import annotations

import numpy as np
import torch

from cacheblend.plan import BlendPlan
from cacheblend.selectors.base import Candidates, Evidence, Selector, members
from cacheblend.selectors.given import GivenRowsSelector, LayerRows


class RowSelection:
    """The context rows of one blended prompt that are computed, narrowed from layer to layer.

    Args:
        plan: of the prompt; it reuses something.
        num_layers: of the model.
        device: where positions live.
        fresh: [n] int64 ascending, the fresh rows before the question that are still to compute.
        attention: [rows before the question] float32, what the question pays to each, for selectors that need it; else
            None.
        start: chosen rows before it have been computed already, by an earlier blend of the same plan.
        candidates: `Candidates.of_plan`, if the caller has had time for it; else made here.

    Attributes:
        drop_layers: the layers before which rows are dropped, ascending; never the first.
    """

    def __init__(
        self,
        plan: BlendPlan,
        num_layers: int,
        device: torch.device,
        fresh: torch.Tensor,
        attention: torch.Tensor | None = None,
        start: int = 0,
        candidates: Candidates | None = None,
    ) -> None:
        assert plan.selector is not None
        self._selector: Selector = plan.selector
        self._given = plan.selector if isinstance(plan.selector, GivenRowsSelector) else None
        shares = dict(plan.selector.shares(num_layers))
        # Asked for layer by layer.
        self._shares = shares if plan.selector.needs(Evidence.DEVIATION) else {}
        given = () if self._given is None else (layer for layer, _ in self._given.layers)
        self.drop_layers = tuple(layer for layer in sorted({*self._shares, *given}) if 0 < layer < num_layers)
        self._context = plan.question.start
        self._device = device
        self._fresh = fresh.cpu().numpy()
        self._start = start
        candidates = candidates or Candidates.of_plan(plan)
        if attention is not None:
            # In numpy: see `Candidates.take`.
            scores = attention.cpu().numpy().take(candidates.positions.numpy())
            candidates = candidates.scored(torch.from_numpy(scores))
        self._per_layer: list[int] = []
        # Deviation drops rows at its check layers, and not before.
        all_enter = plan.selector.recomputes_everything or plan.selector.needs(Evidence.DEVIATION)
        if not all_enter:
            candidates = candidates.take(plan.selector.choose(candidates, plan.selector.share))
        self._keep(candidates)
        self._layer_rows = {0: self._chosen.positions}

    def drops_at(self, layer: int) -> bool:
        """Whether rows are dropped before `layer`."""
        return layer in self.drop_layers

    def needs_deviation_at(self, layer: int) -> bool:
        """Whether the rows that `layer` drops depend on the deviation measured there."""
        return layer in self._shares

    def narrow(self, layer: int, deviation: torch.Tensor | None = None) -> torch.Tensor:
        """Drop rows at a layer that drops some.

        Args:
            layer: which one.
            deviation: [rows] float32 over the current rows, in their order, where it is needed.

        Returns:
            [rows] bool, True where a row goes on.
        """
        before = self._rows
        if deviation is None:
            assert self._given is not None
            self._keep(self._chosen.take(members(self._chosen.positions, self._given.rows_from(layer) or ())))
        else:
            of_candidates = deviation.cpu().numpy()[self._is_candidate.take(before)]
            scored = self._chosen.scored(torch.from_numpy(of_candidates))
            self._keep(scored.take(self._selector.choose(scored, self._shares[layer])))
        self._layer_rows[layer] = self._chosen.positions
        return torch.from_numpy(self._is_row.take(before)).to(self._device)

    def _keep(self, chosen: Candidates) -> None:
        self._chosen = chosen
        # In numpy: see `Candidates.take`. By tables of all positions, which cost less than sorting and searching do.
        positions = chosen.positions.numpy()
        self._is_candidate = np.zeros(self._context, dtype=bool)
        self._is_candidate[positions[np.searchsorted(positions, self._start) :]] = True
        self._is_row = self._is_candidate.copy()
        self._is_row[self._fresh] = True
        self._rows = np.flatnonzero(self._is_row)
        self._positions = torch.from_numpy(self._rows).to(self._device)

    @property
    def positions(self) -> torch.Tensor:
        """[rows] int64 ascending: fresh rows and the reusable rows chosen so far that are still to compute."""
        return self._positions

    def count_layers(self, layers: int = 1) -> None:
        """Note that so many layers ran with the current rows."""
        self._per_layer.extend([len(self._chosen.positions)] * layers)

    @property
    def chosen(self) -> torch.Tensor:
        """[n] int64 ascending on the CPU: reusable positions recomputed."""
        return self._chosen.positions

    @property
    def rows(self) -> tuple[int, ...]:
        """Reusable positions recomputed, ascending."""
        return tuple(self._chosen.positions.tolist())

    @property
    def layer_rows(self) -> LayerRows:
        """The reusable positions recomputed, from each layer on that changed them."""
        return tuple((layer, tuple(positions.tolist())) for layer, positions in self._layer_rows.items())

    @property
    def ratio(self) -> float:
        """Recomputed over reusable rows, averaged over the layers counted."""
        layers = len(self._per_layer)
        reusable = self._chosen.total
        return sum(self._per_layer) / (layers * reusable) if layers and reusable else 0.0
