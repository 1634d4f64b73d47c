"""Plots of speed: time to first token by prompt length beside its floor, and where that time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from eval.errors import EvalError
from eval.speed.results import ArmTime, TtftRun

# Okabe and Ito's palette, which tells apart for every common kind of colour vision.
BLACK, GREY = "#000000", "#8c8c8c"
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
STAGE_COLOURS = {"load": SKY, "relocate": PURPLE, "score": ORANGE, "recompute": BLUE}
OTHER_STAGES = (GREEN, VERMILION)
REST = "engine step and question"
STYLE = {"svg.hashsalt": "cacheblend", "font.size": 10}


def plot_ttft_by_length(runs: Sequence[TtftRun], path: Path) -> None:
    """Draw one panel an arm: its time to first token and its floor by prompt length, beside full prefill's.

    Args:
        runs: one or more prompt lengths, with chunks on the host; arms that all of them have are drawn.
        path: of the PNG or SVG; an existing file is replaced.

    Raises:
        EvalError: the runs have no arm in common.
    """
    runs = sorted(runs, key=lambda run: run.prompt_tokens)
    names = [arm.name for arm in runs[0].arms if all(arm.name in _by_name(run) for run in runs)]
    if not names:
        raise EvalError("The runs have no blended arm in common; measure the same arms at every length.")
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    with rc_context(STYLE):
        figure = new_figure(3.2 * columns + 0.6, 3.1 * rows + 0.8)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, name in zip(panels, names, strict=False):
            _draw_arm(axes, name, runs)
        for axes in panels[len(names) :]:
            axes.set_visible(False)
        for number, axes in enumerate(panels[: len(names)]):
            if number + columns >= len(names):
                axes.set_xlabel("prompt, tokens")
                axes.xaxis.set_tick_params(labelbottom=True)
            if number % columns == 0:
                axes.set_ylabel("time to first token, ms")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(
            f"Time to first token, and how many times its floor that is ({runs[0].model}, {runs[0].device})"
        )
        save_figure(figure, path)


def plot_parts(run: TtftRun, path: Path) -> None:
    """Draw one stacked bar an arm: the blend's stages, the rest of the time to first token, and a mark at the floor.

    Args:
        run: with arms.
        path: of the PNG or SVG; an existing file is replaced.
    """
    stages = list(dict.fromkeys(stage for stage in STAGE_COLOURS if any(stage in arm.parts_ms for arm in run.arms)))
    stages += sorted({stage for arm in run.arms for stage in arm.parts_ms} - set(stages))
    others = iter(OTHER_STAGES * len(stages))
    colours = {stage: STAGE_COLOURS.get(stage) or next(others) for stage in stages}
    with rc_context(STYLE):
        figure = new_figure(10, 0.55 * len(run.arms) + 1.9)
        axes = figure.subplots()
        at = range(len(run.arms))
        left = [0.0] * len(run.arms)
        for stage in stages:
            widths = [arm.parts_ms.get(stage, 0.0) for arm in run.arms]
            axes.barh(at, widths, left=left, color=colours[stage], edgecolor="white", height=0.62, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        # Medians of stages may sum to more than the median of their sum.
        rest = [max(0.0, arm.ms - done) for arm, done in zip(run.arms, left, strict=True)]
        axes.barh(at, rest, left=left, color="#d9d9d9", edgecolor="white", height=0.62, label=REST)
        floors = [arm.floor_ms for arm in run.arms]
        axes.vlines(floors, [i - 0.42 for i in at], [i + 0.42 for i in at], color=BLACK, linewidth=2.2, label="floor")
        for number, arm in enumerate(run.arms):
            text = f" {arm.ms:.1f} ms, {arm.share_of_full:.2f} of full, {arm.ms / arm.floor_ms:.2f} of the floor"
            axes.text(max(arm.ms, left[number], arm.floor_ms), number, text, va="center", fontsize=9)
        axes.set_yticks(list(at), [arm.name for arm in run.arms])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.55 * max(arm.ms for arm in run.arms))
        axes.set_xlabel(f"milliseconds; full prefill takes {run.full_ms:.1f}")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(stages) + 2, frameon=False)
        figure.suptitle(f"Where the time to first token goes: {run.prompt_tokens:,} tokens, {run.model}, {run.device}")
        save_figure(figure, path)


def _draw_arm(axes: Axes, name: str, runs: Sequence[TtftRun]) -> None:
    full = {n: ms for run in runs for n, ms in run.short_full_ms.items()} | {r.prompt_tokens: r.full_ms for r in runs}
    axes.plot(sorted(full), [full[n] for n in sorted(full)], color=GREY, marker="s", markersize=4, label="full prefill")
    lengths = [run.prompt_tokens for run in runs]
    arms = [_by_name(run)[name] for run in runs]
    axes.plot(lengths, [arm.ms for arm in arms], color=BLUE, marker="o", label="measured")
    floors = [arm.floor_ms for arm in arms]
    axes.plot(lengths, floors, color=VERMILION, marker="_", markersize=11, linestyle="--", label="floor, same run")
    for length, arm in zip(lengths, arms, strict=True):
        axes.annotate(
            f"{arm.ms / arm.floor_ms:.2f} x",
            (length, arm.ms),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=BLUE,
        )
    axes.set_title(name, fontsize=10)
    axes.set_xlim(0, 1.12 * max(full))
    axes.set_ylim(0, 1.08 * max(full.values()))
    axes.xaxis.set_major_locator(MultipleLocator(4000))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _by_name(run: TtftRun) -> dict[str, ArmTime]:
    return {arm.name: arm for arm in run.arms}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write it so that the same numbers give the same file."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
