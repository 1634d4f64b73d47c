"""`chunk_head`: the first rows of every chunk (EPIC, arXiv:2410.15332, "LegoLink").

The first tokens of a chunk encoded alone become attention sinks; recomputed in place they no longer are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch

from cacheblend.errors import BlendError
from cacheblend.selectors.base import Candidates, Evidence, Selector, require_ratio


@dataclass(frozen=True)
class ChunkHeadSelector(Selector):
    """Recomputes the first rows of each chunk.

    Attributes:
        tokens: rows per chunk, used when `ratio` is None.
        ratio: share of each chunk's rows instead, rounded up.

    Raises:
        BlendError: if `tokens` is negative or `ratio` is outside 0 to 1.
    """

    tokens: int = 16
    ratio: float | None = None
    name: ClassVar[str] = "chunk_head"
    evidence: ClassVar[Evidence] = Evidence.NOTHING

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise BlendError(f"chunk_head is asked for {self.tokens} tokens a chunk; use 0 or more.")
        if self.ratio is not None:
            require_ratio(self.ratio)

    def choose(self, candidates: Candidates, share: float) -> torch.Tensor:
        """See `Selector.choose`; with a `ratio`, the share counts per chunk, without one `tokens` do."""
        if self.ratio is None:
            return candidates.offsets < self.tokens
        heads = {length: _head_rows(share, length) for length in set(candidates.chunk_lengths.tolist())}
        rows = torch.tensor([heads[length] for length in candidates.chunk_lengths.tolist()], dtype=torch.int64)
        return candidates.offsets < rows

    def expected_rows(self, chunk_lengths: Sequence[int]) -> int:
        """See `Selector.expected_rows`."""
        if self.ratio is not None:
            return sum(_head_rows(self.ratio, length) for length in chunk_lengths)
        return sum(min(self.tokens, length) for length in chunk_lengths)

    @property
    def share(self) -> float:
        """See `Selector.share`."""
        return self.ratio or 0.0

    @property
    def spec(self) -> str:
        """See `Selector.spec`."""
        return f"{self.name}({self.tokens if self.ratio is None else f'ratio={self.ratio!r}'})"


def _head_rows(ratio: float, length: int) -> int:
    """Rows of a chunk's head; a product that only rounding lifts above a whole number is that number."""
    return ceil(round(ratio * length, 6))
