"""`query`: the rows the question attends to.

The question is run once over the reused KV; the attention it pays to each cached key, summed over all layers,
heads and question rows, ranks the rows. Query-guided selection is the common idea of ProphetKV, FusionRAG and
QCFuse (2026); this is its plainest form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend.selectors.base import Candidates, Evidence, Selector, require_ratio, top_rows


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
