"""Draws the plots of speed from the results of `make gpu-bench`, and with a fidelity report those of the dial.

python -m eval.speed_plots --results eval/results/2026-11-30-h200 --out plots
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from eval.report.dial_plots import plot_against_recomputed, plot_against_ttft
from eval.report.speed_plots import plot_parts, plot_ttft_by_length
from eval.speed.results import LONG_TTFT_FILE, RATIO_FILE, TTFT_FILE, read_fidelity, read_shares, read_ttft

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def speed_plots(
    results: Annotated[
        Path, typer.Option(help=f"folder of {TTFT_FILE}, {LONG_TTFT_FILE} and, for the dial, {RATIO_FILE}")
    ],
    out: Annotated[Path, typer.Option(help="folder of the plots, made if it is not there")],
    fidelity: Annotated[Path | None, typer.Option(help="result.json of eval.musique, to draw its arms' dial")] = None,
) -> None:
    """Draw the plots and name each file."""
    with one_sentence_for_bad_input():
        runs = [read_ttft(results / name) for name in (TTFT_FILE, LONG_TTFT_FILE)]
        dial = None if fidelity is None else (read_fidelity(fidelity), read_shares(results))
        _make_folder(out)
        plot_ttft_by_length(runs, _named(out, "ttft-by-length"))
        for run in runs:
            plot_parts(run, _named(out, f"ttft-parts-{run.prompt_tokens}"))
        if dial is not None:
            quality, shares = dial
            plot_against_recomputed(quality, _named(out, "fidelity-by-recomputed"))
            timed_on = f"{runs[0].model}, {runs[0].device}"
            plot_against_ttft(quality, shares, timed_on, _named(out, "fidelity-by-ttft"))


def _named(out: Path, name: str) -> Path:
    path = out / f"{name}.png"
    typer.echo(str(path))
    return path


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvalError(f"--out {out} cannot be made ({error.strerror}); name a folder in a writable place.") from error


if __name__ == "__main__":
    app()
