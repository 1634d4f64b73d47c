"""Which rows of a sequence run through which layer, while a selector is still choosing."""

from __future__ import annotations

import torch

from cacheblend.reference.sequence import RunningSequence
from cacheblend.selectors.base import Candidates, Evidence, Selector


class RowSelection:
    """The context rows of one blended prompt that are computed, narrowed from layer to layer.

    Args:
        sequence: with a plan that reuses something.
        num_layers: of the model.
        device: where positions live.
        fresh: [n] int64 ascending, the fresh rows still to compute.
        scores: [reusable rows] float32 in the order of positions, for selectors that need attention; else None.
    """

    def __init__(
        self,
        sequence: RunningSequence,
        num_layers: int,
        device: torch.device,
        fresh: torch.Tensor,
        scores: torch.Tensor | None,
    ) -> None:
        selector = sequence.plan.selector
        assert selector is not None
        self._selector: Selector = selector
        self._shares = dict(selector.shares(num_layers))
        self._device = device
        self._fresh = fresh
        candidates = Candidates.of_plan(sequence.plan)
        self._reusable = len(candidates.positions)
        if scores is not None:
            candidates = candidates.scored(scores.cpu())
        self._chosen = candidates
        self._per_layer: list[int] = []
        if selector.evidence is not Evidence.DEVIATION:
            self._chosen = candidates.take(selector.choose(candidates, selector.share))

    def narrows_at(self, layer: int) -> bool:
        """Whether rows are dropped before `layer`, by deviation measured there."""
        return self._selector.evidence is Evidence.DEVIATION and layer in self._shares

    def narrow(self, layer: int, deviation: torch.Tensor) -> torch.Tensor:
        """Drop rows at a check layer.

        Args:
            layer: the check layer.
            deviation: [rows] float32 over the current rows, in their order.

        Returns:
            [rows] bool, True where a row goes on.
        """
        before = self.positions
        at_candidates = torch.isin(before, self._chosen.positions.to(self._device))
        scored = self._chosen.scored(deviation[at_candidates].cpu())
        self._chosen = scored.take(self._selector.choose(scored, self._shares[layer]))
        return torch.isin(before, self.positions)

    @property
    def positions(self) -> torch.Tensor:
        """[rows] int64 ascending: fresh rows and the reusable rows chosen so far."""
        return torch.cat([self._fresh, self._chosen.positions.to(self._device)]).sort().values

    def count_layer(self) -> None:
        """Note that a layer ran with the current rows."""
        self._per_layer.append(len(self._chosen.positions))

    @property
    def rows(self) -> tuple[int, ...]:
        """Reusable positions recomputed, ascending."""
        return tuple(self._chosen.positions.tolist())

    @property
    def ratio(self) -> float:
        """Recomputed over reusable rows, averaged over the layers counted."""
        layers = len(self._per_layer)
        return sum(self._per_layer) / (layers * self._reusable) if layers else 0.0
