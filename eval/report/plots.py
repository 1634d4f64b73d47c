"""Plots of fidelity against what it costs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter
from numpy.typing import NDArray

from eval.errors import EvalError
from eval.report.labels import Point, label_points
from eval.report.summary import ArmSummary
from eval.statistics import Interval

FORMATS = (".png", ".svg")
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4ea3", "#a67c00", "#4a4a4a", "#b03a76", "#128080")


@dataclass(frozen=True, slots=True)
class Measure:
    """A vertical axis: how faithful an arm is."""

    label: str
    of: Callable[[ArmSummary], Interval]


@dataclass(frozen=True, slots=True)
class Cost:
    """A horizontal axis: what an arm costs, as a share (marked in percent) or in a unit."""

    label: str
    of: Callable[[ArmSummary], float]
    is_share: bool


MEASURES = (
    Measure("agreement with full prefill", lambda arm: arm.agreement),
    Measure("KL(full || arm), first answer token, nats", lambda arm: arm.kl_first),
    Measure("KL(full || arm), mean along the answer, nats", lambda arm: arm.kl_answer),
)
RECOMPUTED = Cost("recomputed share of reusable rows", lambda arm: arm.recomputed_ratio, is_share=True)
TTFT_MS = Cost("time to first token, p50, ms", lambda arm: arm.ttft_ms_p50, is_share=False)
TTFT_SHARE = Cost("time to first token over full prefill's, p50", lambda arm: arm.full_ttft_share, is_share=True)
SHARE_TICKS = (0, 0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 0.7, 1, 1.5, 2)


def plot_fidelity(
    arms: Sequence[ArmSummary], noise_floor: ArmSummary | None, path: Path, time_axis: Cost | None
) -> None:
    """Draw agreement and divergence against the recomputed share and against the time to first token.

    Each arm is a labelled point with its 95 % interval; what full prefill reaches against itself is a dashed
    line.

    Args:
        arms: one point each, in every panel.
        noise_floor: full prefill against itself in another batch; None draws no line.
        path: ends in .png or .svg; an existing file is replaced.
        time_axis: `TTFT_MS`, or `TTFT_SHARE`, which is what a CPU's result may state; None where times are void.

    Raises:
        EvalError: there is no arm, or ``path`` has another ending.
    """
    if not arms:
        raise EvalError("A plot needs at least one arm.")
    if path.suffix not in FORMATS:
        raise EvalError(f"A plot is written as {' or '.join(FORMATS)}, not as {path.name!r}.")
    costs = (RECOMPUTED,) if time_axis is None else (RECOMPUTED, time_axis)
    # Without a salt and with a date the same numbers would give another SVG on each run.
    with rc_context({"svg.hashsalt": "cacheblend", "font.size": 9}):
        figure = Figure(figsize=(1 + 6 * len(costs), 12.5), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(MEASURES), len(costs), sharex="col", sharey="row", squeeze=False)
        panels: list[list[Axes]] = grid.tolist()
        figure.suptitle(f"Fidelity and what it costs ({arms[0].questions} questions, 95 % intervals)")
        for row, measure in zip(panels, MEASURES, strict=True):
            for axes, cost in zip(row, costs, strict=True):
                _draw_arms(axes, arms, measure, cost)
                _draw_noise_floor(axes, noise_floor, measure)
        _name_axes(panels, costs)
        figure.draw_without_rendering()
        _label_arms(panels, arms, costs)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_arms(axes: Axes, arms: Sequence[ArmSummary], measure: Measure, cost: Cost) -> None:
    for arm in arms:
        interval = measure.of(arm)
        below_above = [[interval.mean - interval.low], [interval.high - interval.mean]]
        axes.errorbar(
            cost.of(arm),
            interval.mean,
            yerr=below_above,
            fmt="o",
            markersize=5,
            elinewidth=0.9,
            capsize=2,
            alpha=0.9,
            color=_colour(arm, arms),
        )
    # Most arms lie at small costs: the root of the cost gives them room, and unlike a logarithm keeps 0.
    axes.set_xscale("function", functions=(_signed_root, _signed_square))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.12, y=0.1)


def _signed_root(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sign(values) * np.sqrt(np.abs(values))


def _signed_square(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sign(values) * np.square(values)


def _draw_noise_floor(axes: Axes, noise_floor: ArmSummary | None, measure: Measure) -> None:
    if noise_floor is None:
        return
    level = measure.of(noise_floor).mean
    axes.axhline(level, color="#777777", linestyle="--", linewidth=0.9, label=f"noise floor ({noise_floor.name})")
    axes.legend(loc="best", fontsize=7.5, frameon=False)


def _name_axes(panels: Sequence[Sequence[Axes]], costs: Sequence[Cost]) -> None:
    for row, measure in zip(panels, MEASURES, strict=True):
        row[0].set_ylabel(measure.label)
    for axes, cost in zip(panels[-1], costs, strict=True):
        axes.set_xlabel(cost.label)
        if cost.is_share:
            axes.xaxis.set_major_locator(FixedLocator(SHARE_TICKS))
            axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _label_arms(panels: Sequence[Sequence[Axes]], arms: Sequence[ArmSummary], costs: Sequence[Cost]) -> None:
    for row, measure in zip(panels, MEASURES, strict=True):
        for axes, cost in zip(row, costs, strict=True):
            label_points(axes, [_point(arm, arms, measure, cost) for arm in arms])


def _point(arm: ArmSummary, arms: Sequence[ArmSummary], measure: Measure, cost: Cost) -> Point:
    interval = measure.of(arm)
    return Point(
        x=cost.of(arm),
        y=interval.mean,
        low=interval.low,
        high=interval.high,
        text=arm.name,
        colour=_colour(arm, arms),
    )


def _colour(arm: ArmSummary, arms: Sequence[ArmSummary]) -> str:
    """One colour for all ratios of a selector, in order of appearance."""
    families = list(dict.fromkeys(_family(other) for other in arms))
    return COLOURS[families.index(_family(arm)) % len(COLOURS)]


def _family(arm: ArmSummary) -> str:
    """The arm's name without its numbers: `deviation:0.15` is of the family `deviation`, and not with drift."""
    return re.sub(r"[\s@:=(]*\d[\d.]*", "", arm.name)
