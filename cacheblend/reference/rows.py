"""Rows of several sequences, side by side without padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from cacheblend.reference.attention import RowBlock, row_blocks
from cacheblend.reference.sequence import RunningSequence


@dataclass(frozen=True)
class SequenceRows:
    """Some rows of one sequence.

    Attributes:
        sequence: whose rows.
        positions: [n] int64 ascending, distinct.
    """

    sequence: RunningSequence
    positions: torch.Tensor

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """The rows as blocks of attention, the same for every layer."""
        return row_blocks(self.positions)

    def token_ids(self) -> torch.Tensor:
        """[n] int64 ids of the rows."""
        ids = torch.tensor(self.sequence.token_ids, dtype=torch.int64, device=self.positions.device)
        return ids[self.positions]


class RowBatch:
    """The rows of one forward pass; sequences without rows are left out."""

    def __init__(self, parts: list[SequenceRows]) -> None:
        self.parts = [part for part in parts if len(part.positions)]

    def __len__(self) -> int:
        return sum(len(part.positions) for part in self.parts)

    def __iter__(self) -> Iterator[tuple[SequenceRows, slice]]:
        """Each sequence's rows with their slice of the batch."""
        start = 0
        for part in self.parts:
            end = start + len(part.positions)
            yield part, slice(start, end)
            start = end

    def positions(self) -> torch.Tensor:
        """[rows] int64."""
        return torch.cat([part.positions for part in self.parts])

    def token_ids(self) -> torch.Tensor:
        """[rows] int64."""
        return torch.cat([part.token_ids() for part in self.parts])

    def last_rows(self, counts: list[int]) -> torch.Tensor:
        """Indices into the batch of each sequence's last `counts[i]` rows, in order; [sum(counts)] int64."""
        ranges = [torch.arange(where.stop - count, where.stop) for (_, where), count in zip(self, counts, strict=True)]
        return torch.cat(ranges)
