"""What a selector is: one policy that picks the reusable rows to recompute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np
import torch

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan
from cacheblend.ragged import places_within


class Evidence(StrEnum):
    """What must be measured before a selector can choose."""

    NOTHING = "nothing"
    DEVIATION = "deviation"
    ATTENTION = "attention"


@dataclass(frozen=True)
class Candidates:
    """The reusable rows a selector may choose from, all on the CPU.

    Attributes:
        positions: [n] int64, ascending positions in the prompt.
        offsets: [n] int64, each row's offset in its own chunk.
        chunk_lengths: [n] int64, the length of each row's chunk.
        total: reusable rows of the whole plan; ratios are shares of this number.
        scores: [n] float32, the evidence asked for (higher: recompute first), or None.
    """

    positions: torch.Tensor
    offsets: torch.Tensor
    chunk_lengths: torch.Tensor
    total: int
    scores: torch.Tensor | None = None

    @classmethod
    def of_plan(cls, plan: BlendPlan) -> Candidates:
        """The reusable rows of `plan` that its selector may choose from, without scores."""
        spans = plan.choosable
        lengths = np.array([span.length for span in spans], dtype=np.int64)
        starts = np.array([span.start for span in spans], dtype=np.int64)
        offsets = places_within(lengths)
        return cls(
            positions=torch.from_numpy(offsets + starts.repeat(lengths)),
            offsets=torch.from_numpy(offsets),
            chunk_lengths=torch.from_numpy(lengths.repeat(lengths)),
            total=plan.reused_tokens,
        )

    def take(self, index: torch.Tensor) -> Candidates:
        """The candidates at `index` ([m] int64, or [n] bool, on the CPU)."""
        # In numpy, whose small operations cost a tenth of torch's: on a GPU it is what the device waits for.
        at = index.numpy()
        if index.dtype == torch.bool:
            # Once here, and not in each of the tensors.
            at = np.flatnonzero(at)
        columns = (self.positions, self.offsets, self.chunk_lengths)
        positions, offsets, chunk_lengths = (torch.from_numpy(column.numpy().take(at)) for column in columns)
        scores = None if self.scores is None else torch.from_numpy(self.scores.numpy().take(at))
        return Candidates(positions, offsets, chunk_lengths, self.total, scores)

    def scored(self, scores: torch.Tensor) -> Candidates:
        """The same rows with `scores` ([n] float32)."""
        return Candidates(self.positions, self.offsets, self.chunk_lengths, self.total, scores)

    def budget(self, share: float) -> int:
        """Rows that `share` of the plan's reusable rows is, rounded to the nearest."""
        return min(len(self.positions), round(share * self.total))


class Selector(ABC):
    """Picks the reusable rows to recompute.

    A subclass is a small frozen dataclass of its parameters. It sees rows and scores, never a model: the
    runner measures the evidence the class names, on whatever device, and hands it over.
    """

    name: ClassVar[str]
    evidence: ClassVar[Evidence]

    @abstractmethod
    def choose(self, candidates: Candidates, share: float) -> torch.Tensor:
        """Pick rows.

        Args:
            candidates: the rows to choose from; `scores` are set if `evidence` is not NOTHING.
            share: the share of the plan's reusable rows to keep, from `shares`; 1 keeps every one.

        Returns:
            [n] bool over the candidates, True where the row is recomputed.
        """

    def shares(self, num_layers: int) -> tuple[tuple[int, float], ...]:
        """Layers from which fewer rows are recomputed, with the share kept from there on, layers ascending.

        `(0, share)` decides once, before the first layer. A later layer means: all candidates up to there.
        """
        del num_layers
        return ((0, self.share),)

    def expected_rows(self, chunk_lengths: Sequence[int]) -> int:
        """Rows it will choose from reused chunks of these lengths, before any evidence is seen."""
        return round(self.share * sum(chunk_lengths))

    @property
    def recomputes_everything(self) -> bool:
        """Whether every reusable row of any plan goes through every layer, whatever the evidence would say.

        Stored KV would be overwritten then before it is read, so none is wanted and nothing has to be measured. Only a
        share of 1 promises that: whether a smaller one rounds to all rows, or heads cover their chunks, depends on the
        plan.
        """
        return self.share >= 1.0

    @property
    def recomputes_nothing(self) -> bool:
        """Whether no reusable row of any plan is recomputed."""
        return False

    @property
    def spares_exact_rows(self) -> bool:
        """Whether rows whose stored KV is full prefill's own are no candidates."""
        return not self.recomputes_everything

    def needs(self, evidence: Evidence) -> bool:
        """Whether it chooses by `evidence`, which then has to be measured."""
        return self.evidence is evidence and not self.recomputes_everything

    @property
    @abstractmethod
    def share(self) -> float:
        """Share of reusable rows asked for, the smallest of `shares`; 0 where a number of rows is asked for instead."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """The selector and its parameters as one string that names what changes the KV."""


def require_ratio(ratio: float) -> None:
    """Refuse a ratio that is not a number from 0 to 1.

    Raises:
        BlendError: naming the ratio.
    """
    if not 0.0 <= ratio <= 1.0:
        raise BlendError(f"ratio is {ratio}; use a share from 0 to 1, for example 0.15.")


def members(values: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    """Which positions are wanted, by a table of all positions: a search costs several times as much.

    Args:
        values: [n] int64 ascending, not negative, on the CPU.
        wanted: positions, in any order.

    Returns:
        [n] bool.
    """
    positions, numbers = values.numpy(), np.array(wanted, dtype=np.int64)
    table = np.zeros(positions[-1] + 1 if len(positions) else 0, dtype=bool)
    table[numbers[(numbers >= 0) & (numbers < len(table))]] = True
    return torch.from_numpy(table.take(positions))


def top_rows(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the `count` highest scores; equal scores go to the earlier row, so a choice never varies.

    Args:
        scores: [n] float32; one that is no number counts as infinite.
        count: rows to mark, at most n.

    Returns:
        [n] bool.
    """
    if count == 0:
        return torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    # In numpy, whose small operations cost a tenth of torch's: on a GPU it is what the device waits for.
    ranked = scores.cpu().numpy()
    if np.isnan(ranked).any():
        ranked = np.nan_to_num(ranked, nan=np.inf, posinf=np.inf, neginf=-np.inf)
    # Only the lowest score that is marked matters: to sort all costs ten times as much.
    lowest = np.partition(ranked, -count)[-count]
    chosen = ranked >= lowest
    too_many = np.count_nonzero(chosen) - count
    if too_many:
        chosen[np.flatnonzero(ranked == lowest)[-too_many:]] = False
    return torch.from_numpy(chosen).to(scores.device)
