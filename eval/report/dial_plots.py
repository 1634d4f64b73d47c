"""Plots of the cost-quality dial: a line a selector, its parameter along it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from eval.errors import EvalError
from eval.fidelity.arms import DRIFT
from eval.report.labels import Point, label_points
from eval.report.speed_plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    new_figure,
    save_figure,
)
from eval.speed.results import ArmFidelity, ArmKey, FidelityRun
from eval.statistics import Interval

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
MARKERS = "osD^vPX"
MEASURES = ("agreement with full prefill", "KL(full || arm), first token, nats")


def plot_against_recomputed(run: FidelityRun, path: Path) -> None:
    """Draw agreement and divergence against the share of reusable rows that is recomputed.

    Raises:
        EvalError: the report has no arm but full prefill.
    """
    costs = {arm.name: arm.recomputed_ratio for arm in run.arms}
    title = f"Fidelity ({_of(run)}) against share recomputed"
    _draw(run, costs, "recomputed share of reusable rows", title, path, label_ratios=False)


def plot_against_ttft(run: FidelityRun, shares: Mapping[ArmKey, float], timed_on: str, path: Path) -> None:
    """Draw agreement and divergence against the time to first token, of the arms whose time was measured.

    Args:
        run: where fidelity comes from.
        shares: time to first token over full prefill's, by arm.
        timed_on: model and device of the times.
        path: of the PNG or SVG; an existing file is replaced.

    Raises:
        EvalError: none of the report's arms was timed.
    """
    costs = {arm.name: shares[arm.key] for arm in run.arms if arm.key is not None and arm.key in shares}
    title = f"Fidelity ({_of(run)}) against time to first token ({timed_on})"
    _draw(run, costs, "time to first token, share of full prefill's", title, path, label_ratios=True)


def _of(run: FidelityRun) -> str:
    return f"{run.model}, {run.questions} questions of {run.data}"


def _draw(run: FidelityRun, costs: Mapping[str, float], label: str, title: str, path: Path, label_ratios: bool) -> None:
    families: dict[str, list[ArmFidelity]] = defaultdict(list)
    for arm in run.arms:
        if arm.name in costs:
            families[_family_and_parameter(arm.name)[0]].append(arm)
    if not families:
        raise EvalError("No arm of the fidelity report is among those that were timed; run both with the same arms.")
    with rc_context(STYLE):
        figure = new_figure(12, 6.4)
        panels = figure.subplots(1, 2)
        for axes, measure in zip(panels, MEASURES, strict=True):
            for number, (family, arms) in enumerate(families.items()):
                _draw_family(axes, family, arms, costs, measure, number)
            if run.noise_floor is not None:
                floor = _value(run.noise_floor, measure).mean
                axes.axhline(floor, color=GREY, linestyle="--", linewidth=1, label="full prefill again (noise floor)")
            axes.set(xlabel=label, ylabel=measure)
            axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
            axes.set_xlim(left=-0.01)
            axes.set_ylim(bottom=0)
            axes.margins(x=0.08)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=min(5, len(families) + 1),
            frameon=False,
        )
        figure.suptitle(f"{title}\nbars are 95 % intervals", fontsize=11)
        figure.draw_without_rendering()
        for axes, measure in zip(panels, MEASURES, strict=True):
            _label(axes, families, costs, measure, label_ratios)
        save_figure(figure, path)


def _draw_family(
    axes: Axes, family: str, arms: Sequence[ArmFidelity], costs: Mapping[str, float], measure: str, number: int
) -> None:
    ordered = sorted(arms, key=lambda arm: costs[arm.name])
    xs = [costs[arm.name] for arm in ordered]
    values = [_value(arm, measure) for arm in ordered]
    axes.errorbar(
        xs,
        [value.mean for value in values],
        yerr=[[value.mean - value.low for value in values], [value.high - value.mean for value in values]],
        color=COLOURS[number % len(COLOURS)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=6,
        linewidth=1.6,
        elinewidth=0.8,
        capsize=2,
        label=family,
    )


def _label(
    axes: Axes,
    families: Mapping[str, Sequence[ArmFidelity]],
    costs: Mapping[str, float],
    measure: str,
    label_ratios: bool,
) -> None:
    points = []
    for number, arms in enumerate(families.values()):
        for arm in arms:
            parameter, value = _family_and_parameter(arm.name)[1], _value(arm, measure)
            # A ratio is its own place on an axis of recomputed shares.
            if parameter and (label_ratios or parameter.isdigit()):
                colour = COLOURS[number % len(COLOURS)]
                points.append(Point(costs[arm.name], value.mean, value.low, value.high, parameter, colour))
    label_points(axes, points)


def _family_and_parameter(name: str) -> tuple[str, str]:
    """`query, drift` and `0.15` for the arm `query:0.15:drift`: what is joined by a line, and a point's place on it."""
    selector, *parameters = name.split(":")
    numbers = [parameter for parameter in parameters if parameter != DRIFT]
    return f"{selector}, {DRIFT}" if len(numbers) < len(parameters) else selector, ":".join(numbers)


def _value(arm: ArmFidelity, measure: str) -> Interval:
    return arm.agreement if measure == MEASURES[0] else arm.kl_first
