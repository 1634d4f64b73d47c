"""`given`: rows decided elsewhere, recomputed as they are. Replays a blend; no user picks it by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend.errors import BlendError
from cacheblend.selectors.base import Candidates, Evidence, Selector, members

LayerRows = tuple[tuple[int, tuple[int, ...]], ...]
"""(layer, positions) pairs, layers ascending from 0: the reusable rows recomputed from that layer on."""


@dataclass(frozen=True)
class GivenRowsSelector(Selector):
    """Recomputes the rows it is given.

    Attributes:
        layers: from which layer on which positions are recomputed; each set lies within the one before.

    Raises:
        BlendError: if the layers do not ascend from 0.
    """

    layers: LayerRows
    name: ClassVar[str] = "given"
    evidence: ClassVar[Evidence] = Evidence.NOTHING

    def __post_init__(self) -> None:
        numbers = [layer for layer, _ in self.layers]
        if not numbers or numbers[0] != 0 or numbers != sorted(set(numbers)):
            raise BlendError(f"Given rows start at layers {numbers}; they ascend from 0.")

    @classmethod
    def everywhere(cls, positions: Sequence[int]) -> GivenRowsSelector:
        """The same positions in every layer."""
        return cls(((0, tuple(positions)),))

    def choose(self, candidates: Candidates, share: float) -> torch.Tensor:
        """See `Selector.choose`: the rows of layer 0."""
        return members(candidates.positions, self.layers[0][1])

    def rows_from(self, layer: int) -> tuple[int, ...] | None:
        """The positions that go on at `layer`, None where nothing changes."""
        return dict(self.layers).get(layer)

    def expected_rows(self, chunk_lengths: Sequence[int]) -> int:
        """See `Selector.expected_rows`."""
        return len(self.layers[0][1])

    @property
    def spares_exact_rows(self) -> bool:
        """See `Selector.spares_exact_rows`: what is given is recomputed."""
        return False

    @property
    def share(self) -> float:
        """See `Selector.share`; the number of rows is fixed instead."""
        return 0.0

    @property
    def spec(self) -> str:
        """See `Selector.spec`."""
        counts = "+".join(f"{len(rows)}@{layer}" for layer, rows in self.layers)
        return f"{self.name}({counts})"
