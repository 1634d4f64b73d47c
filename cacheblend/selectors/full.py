"""`full`: every reusable row, the check that blending changes nothing when it recomputes everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend.selectors.base import Candidates, Evidence, Selector


@dataclass(frozen=True)
class FullSelector(Selector):
    """Recomputes every reusable row through the blend path."""

    name: ClassVar[str] = "full"
    evidence: ClassVar[Evidence] = Evidence.NOTHING

    def choose(self, candidates: Candidates, share: float) -> torch.Tensor:
        """See `Selector.choose`."""
        del share
        return torch.ones(len(candidates.positions), dtype=torch.bool)

    @property
    def share(self) -> float:
        """See `Selector.share`."""
        return 1.0

    @property
    def spec(self) -> str:
        """See `Selector.spec`."""
        return self.name
