"""Straight lines through measured times, and where two costs cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.errors import EvalError


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope x, by least squares.

    Attributes:
        intercept: in the unit of y.
        slope: y by x.
        worst_residual: the largest |y - line| over y.
    """

    intercept: float
    slope: float
    worst_residual: float

    def at(self, x: float) -> float:
        """The line's y."""
        return self.intercept + self.slope * x

    def reaches(self, level: float) -> float:
        """The x at which the line is at `level` (in the unit of y); it must rise or fall."""
        return (level - self.intercept) / self.slope


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line of least squares through points.

    Raises:
        EvalError: there are no two different x.
    """
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise EvalError(f"A line needs points at two lengths or more, not {len(ys)} values at {sorted(set(xs))}.")
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    intercept = mean_y - slope * mean_x
    worst = max(abs(intercept + slope * x - y) / y for x, y in zip(xs, ys, strict=True))
    return Line(intercept, slope, worst)
