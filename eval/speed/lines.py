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


def crossover(xs: Sequence[float], ys: Sequence[float], level: float) -> float | None:
    """The smallest x at which ascending points, joined by straight lines, reach `level`; None if they stay below.

    Args:
        xs: ascending.
        ys: one an x.
        level: in the unit of y.
    """
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if y < level:
            continue
        if number == 0:
            return x
        x0, y0 = xs[number - 1], ys[number - 1]
        return x0 + (x - x0) * (level - y0) / (y - y0)
    return None
