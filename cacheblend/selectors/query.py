"""`query`: the rows the question attends to.

The question is run once over the reused KV; the attention it pays to each cached key, summed over heads, question
rows and the second half of the layers, ranks the rows. Query-guided selection is the common idea of ProphetKV,
FusionRAG and QCFuse (2026). Which layers is ours, found on calibration data
(`eval/results/2026-11-30-h200-calibration`): the first third is not told from chance, and for chunks behind a primer
all layers together rank worse than the second half alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend.selectors.base import Candidates, Evidence, Selector, require_ratio, top_rows


def first_tallied_layer(num_layers: int) -> int:
    """The first layer whose attention ranks rows, of a model of so many."""
    return num_layers // 2


@dataclass(frozen=True)
class QuerySelector(Selector):
    """Recomputes the `ratio` of reusable rows that the question attends to most.

    Raises:
        BlendError: if `ratio` is outside 0 to 1.
    """

    ratio: float = 0.15
    name: ClassVar[str] = "query"
    evidence: ClassVar[Evidence] = Evidence.ATTENTION

    def __post_init__(self) -> None:
        require_ratio(self.ratio)

    def choose(self, candidates: Candidates, share: float) -> torch.Tensor:
        """See `Selector.choose`; scores are attention mass."""
        assert candidates.scores is not None
        return top_rows(candidates.scores, candidates.budget(share))

    @property
    def share(self) -> float:
        """See `Selector.share`."""
        return self.ratio

    @property
    def spec(self) -> str:
        """See `Selector.spec`."""
        return f"{self.name}(ratio={self.ratio!r})"
