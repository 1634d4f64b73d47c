"""`chunk_head+query` and `chunk_head+deviation`: heads first, the rest of the budget by score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend.selectors.base import Candidates, Evidence, Selector, top_rows
from cacheblend.selectors.chunk_head import ChunkHeadSelector
from cacheblend.selectors.deviation import DeviationSelector
from cacheblend.selectors.query import QuerySelector


@dataclass(frozen=True)
class HeadsThenSelector(Selector):
    """Keeps every chunk's head and fills the scored selector's share with its highest-scored rows.

    The share counts all rows, heads included; heads are kept even where they alone exceed it.
    """

    heads: ChunkHeadSelector
    scored: QuerySelector | DeviationSelector

    @property
    def name(self) -> str:  # type: ignore[override]
        """As the registry knows it, for example `chunk_head+query`."""
        return f"{self.heads.name}+{self.scored.name}"

    @property
    def evidence(self) -> Evidence:  # type: ignore[override]
        """What the scored selector needs."""
        return self.scored.evidence

    def choose(self, candidates: Candidates, share: float) -> torch.Tensor:
        """See `Selector.choose`."""
        assert candidates.scores is not None
        chosen = self.heads.choose(candidates, self.heads.share)
        rest = max(0, candidates.budget(share) - int(chosen.sum()))
        return chosen | top_rows(candidates.scores.masked_fill(chosen, -torch.inf), rest)

    def shares(self, num_layers: int) -> tuple[tuple[int, float], ...]:
        """See `Selector.shares`."""
        return self.scored.shares(num_layers)

    def expected_rows(self, chunk_lengths: Sequence[int]) -> int:
        """See `Selector.expected_rows`."""
        return max(self.heads.expected_rows(chunk_lengths), self.scored.expected_rows(chunk_lengths))

    @property
    def share(self) -> float:
        """See `Selector.share`."""
        return self.scored.share

    @property
    def spec(self) -> str:
        """See `Selector.spec`."""
        return f"{self.heads.spec}+{self.scored.spec}"
