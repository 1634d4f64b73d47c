"""`none`: plain reuse, the fastest and least faithful policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend.selectors.base import Candidates, Evidence, Selector


@dataclass(frozen=True)
class NoneSelector(Selector):
    """Recomputes no reusable row."""

    name: ClassVar[str] = "none"
    evidence: ClassVar[Evidence] = Evidence.NOTHING

    def choose(self, candidates: Candidates, share: float) -> torch.Tensor:
        """See `Selector.choose`."""
        del share
        return torch.zeros(len(candidates.positions), dtype=torch.bool)

    @property
    def share(self) -> float:
        """See `Selector.share`."""
        return 0.0

    @property
    def recomputes_nothing(self) -> bool:
        """See `Selector.recomputes_nothing`."""
        return True

    @property
    def spec(self) -> str:
        """See `Selector.spec`."""
        return self.name
