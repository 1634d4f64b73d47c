"""A run's report: JSON, Markdown and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.fidelity.arms import FULL_AGAIN
from eval.fidelity.comparisons import Comparison
from eval.fidelity.gates import GateSummary
from eval.fidelity.summary import BuildSummary, RowSummary, RunSummary
from eval.report.plots import TTFT_MS, TTFT_SHARE, plot_fidelity
from eval.report.table import fidelity_table, markdown_table, time_table
from eval.statistics import Interval

JSON_FILE, TABLE_FILE, PLOT_FILE = "result.json", "result.md", "fidelity.png"
_UNITS_OF_TIME = ("ttft_ms_p50", "ttft_ms_p95", "parts_ms")


def write_report(
    folder: Path, summary: RunSummary, account: Mapping[str, Any], settings: Mapping[str, Any], absolute: bool
) -> str:
    """Write the report into `folder` and return its tables and notes, in Markdown.

    Args:
        folder: is there; files of an earlier report are replaced.
        summary: of the run.
        account: its provenance.
        settings: what the results depend on.
        absolute: state milliseconds and seconds; False states shares of full prefill's time only.
    """
    notes = report_notes(summary, settings)
    result = {**account, "settings": settings, "notes": notes, **summary_values(summary, absolute)}
    (folder / JSON_FILE).write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tables = report_tables(summary, notes, absolute)
    (folder / TABLE_FILE).write_text(f"{_heading(account, settings)}\n{tables}", encoding="utf-8")
    shown = [row.arm for row in summary.rows if row.arm.name != FULL_AGAIN]
    floor = summary.noise_floor.arm if summary.noise_floor is not None else None
    times = None if summary.timing_is_void else TTFT_MS if absolute else TTFT_SHARE
    plot_fidelity(shown, floor, folder / PLOT_FILE, times)
    return tables


def report_tables(summary: RunSummary, notes: list[str], absolute: bool) -> str:
    """Return the tables and the notes, in Markdown."""
    arms = [row.arm for row in summary.rows]
    blocks = [
        f"## Fidelity\n\n{summary.questions} questions, means with 95 % bootstrap intervals; KL(full || arm) in nats.",
        fidelity_table(arms).rstrip(),
        "## Against full prefill\n\nScores are paired by question; tokens are means; times are shares of full's.",
        _difference_table(summary).rstrip(),
        *_comparison_blocks(summary.comparisons),
        f"## Time to first token{' (void, see the notes)' if summary.timing_is_void else ''}",
        time_table(arms, absolute).rstrip(),
        "## Notes",
        "\n".join(f"* {note}" for note in [_build_note(summary.build, absolute), *notes]),
    ]
    return "\n\n".join(blocks) + "\n"


def report_notes(summary: RunSummary, settings: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the numbers, one sentence each."""
    notes = [f"Full prefill answers {summary.full_is_right} of {summary.questions} questions exactly."]
    if settings.get("retrieved") is not None:
        notes.append(_retrieved_note(settings["retrieved"]))
    if settings.get("primer") is not None:
        notes.append(_primer_note(settings, summary))
    if summary.gates is not None:
        notes.append(_gates_note(summary.gates))
    if summary.cpu_over_wall is not None:
        notes.append(f"CPU time over wall time of the answers was {summary.cpu_over_wall:.2f}.")
    if settings.get("in_flight") is not None:
        notes.append(_in_flight_note(settings["in_flight"]))
    if summary.cpu_over_wall is not None and summary.timing_is_void:
        notes.append(
            f"That is under {summary.busy_enough:.2f}: other work shared the machine, so the timings are void; "
            "agreement, divergence and scores are not affected."
        )
    if summary.noise_floor is not None:
        floor = summary.noise_floor.arm
        notes.append(
            f"{FULL_AGAIN} is the noise floor: full prefill once more, every row computed, {_other_batches(settings)}; "
            f"agreement {floor.agreement.mean:.2f}, "
            f"KL {floor.kl_first.mean:.1e} first and {floor.kl_answer.mean:.1e} along the answer."
        )
    if "cold" in settings["tiers"]:
        notes.append("Cold chunks are out of host memory; the operating system may still hold their files in its own.")
    if settings["left_out"]:
        notes.append(
            f"{settings['left_out']} questions were left out: with their contexts they do not fit the model's context."
        )
    return notes


def summary_values(summary: RunSummary, absolute: bool) -> dict[str, Any]:
    """Return a JSON-ready summary; without `absolute`, times are shares of full prefill's or of the row's own."""
    values = asdict(summary)
    del values["noise_floor"]
    values["noise_floor"] = summary.noise_floor.arm.name if summary.noise_floor is not None else None
    values["rows"] = [_row_values(row, absolute) for row in summary.rows]
    if not absolute:
        del values["build"]["seconds"]
    return values


def _row_values(row: RowSummary, absolute: bool) -> dict[str, Any]:
    values = asdict(row)
    arm = values.pop("arm")
    if not absolute:
        shares = {part: milliseconds / arm["ttft_ms_p50"] for part, milliseconds in arm["parts_ms"].items()}
        arm = {name: value for name, value in arm.items() if name not in _UNITS_OF_TIME} | {"parts_share": shares}
    return {**arm, **values}


def _difference_table(summary: RunSummary) -> str:
    right = f"F1 where full is right ({summary.full_is_right})"
    header = ["arm", "F1 - full's", "EM - full's", right, "prompt", "reused", "recomputed", "fallbacks", "TTFT p95"]
    return markdown_table(header, [_difference_row(row) for row in summary.rows])


def _comparison_blocks(comparisons: Sequence[Comparison]) -> list[str]:
    if not comparisons:
        return []
    rows = [[c.arm, _signed(c.agreement), _signed(c.kl_first), _signed(c.kl_answer)] for c in comparisons]
    return [
        f"## Against {comparisons[0].other}\n\nDifferences are paired by question; a higher agreement and a lower KL "
        "speak for the arm.",
        markdown_table(["arm", "agreement", "KL, first token", "KL, answer"], rows).rstrip(),
    ]


def _difference_row(row: RowSummary) -> list[str]:
    where_right = "" if row.f1_where_full_is_right is None else f"{row.f1_where_full_is_right:.3f}"
    rows = [f"{count:.0f}" for count in (row.prompt_tokens, row.reused_tokens, row.recomputed_tokens)]
    fallbacks = ", ".join(f"{count} {reason}" for reason, count in row.fallbacks.items()) or "0"
    differences = [_signed(row.f1_difference), _signed(row.em_difference)]
    return [row.arm.name, *differences, where_right, *rows, fallbacks, f"{row.full_ttft_share_p95:.3f}"]


def _signed(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _other_batches(settings: Mapping[str, Any]) -> str:
    if settings.get("in_flight") is not None:
        return "among requests of the other arms"
    return "the documents' rows in one batch and the question's in the next"


def _in_flight_note(in_flight: int) -> str:
    if in_flight == 1:
        return "Each answer was generated alone, so times to first token are those of an idle engine."
    return (
        f"Up to {in_flight} answers of different arms were generated together: their times to first token include one "
        "another's work and are void."
    )


def _retrieved_note(retrieved: Mapping[str, Any]) -> str:
    # Where there are fewer contexts than asked for, each question gets all.
    count = min(retrieved["top_k"], retrieved["contexts"])
    return (
        f"Each question was answered over {count} contexts retrieved from {retrieved['contexts']:,}, not over its own."
    )


def _primer_note(settings: Mapping[str, Any], summary: RunSummary) -> str:
    primer = settings["primer"]
    return (
        f"Chunks were encoded behind the prefix and a primer of {primer['tokens']:,} tokens (whole chunks of the "
        f"data: {primer['chunks']}), the same for every question; {summary.questions_with_primer_chunks} of "
        f"{summary.questions} questions have a context that is part of it, which was encoded behind the prefix alone."
    )


def _gates_note(gates: GateSummary) -> str:
    return (
        f"Gates, on {gates.questions} questions before the run, in nats along full prefill's answer: recomputing every "
        f"row {gates.recompute_all:.1e} (at most {gates.tolerance:.1e} allowed), full prefill again "
        f"{gates.noise_floor:.1e}, blanked chunks {gates.blanked:.1e} with {gates.answers_changed} answers changed."
    )


def _build_note(build: BuildSummary, absolute: bool) -> str:
    size = f"KV takes {build.bytes_per_token:,} bytes a token"
    if build.full_prefill_share is None:
        return f"{size}; every chunk was there before the run."
    time = f"{build.full_prefill_share:.2f} of full prefill's time for the same questions"
    seconds = f"{build.seconds:.1f} seconds, " if absolute else ""
    return f"{size}; computing {build.chunks} chunks ({build.tokens:,} tokens) beforehand took {seconds}{time}."


def _heading(account: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    code, device = account["code"], account["device"]
    versions = ", ".join(f"{package} {version}" for package, version in account["versions"].items())
    commit = (code["commit"] or "unknown") + (" with uncommitted changes" if code["dirty"] else "")
    return (
        f"# Fidelity on {account['data']['name']}: {account['model']['name']}, {settings['dtype']}\n\n"
        f"Engine {settings['engine']} on {device.get('gpu', device['cpu'])} ({device['kind']}), chunks behind the "
        f"prefix `{settings['prefix']}`{_and_primer(settings)}, seed {account['seed']}. Commit {commit}; {versions}. "
        f"Arguments and settings are in {JSON_FILE}.\n"
    )


def _and_primer(settings: Mapping[str, Any]) -> str:
    return "" if settings.get("primer") is None else f" and a primer of {settings['primer']['tokens']:,} tokens"
