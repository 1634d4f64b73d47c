"""Markdown tables."""

from collections.abc import Sequence

from eval.errors import EvalError
from eval.report.summary import ArmSummary
from eval.statistics import Interval


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, first column to the left and the others to the right, ending in a line feed.

    Raises:
        EvalError: a row has another number of cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise EvalError(f"A table of {len(header)} columns cannot hold the row {list(row)!r}.")
    marks = ["---"] + ["---:"] * (len(header) - 1)
    return "".join(f"| {' | '.join(map(_escape, line))} |\n" for line in (header, marks, *rows))


def fidelity_table(arms: Sequence[ArmSummary]) -> str:
    """Return how each arm answers: agreement and divergence first, then scores; means with 95 % intervals."""
    header = ["arm", "recomputed", "agreement", "KL first", "KL answer", "F1", "EM", "token F1", "questions"]
    return markdown_table(header, [_fidelity_row(arm) for arm in arms])


def time_table(arms: Sequence[ArmSummary], absolute: bool) -> str:
    """Return how long each arm takes to the first token, and in which parts.

    Args:
        arms: one row each.
        absolute: state milliseconds beside the ratio; leave it False where the device is a CPU, whose times
            mean nothing elsewhere. Parts are then shares of the arm's own time to first token.
    """
    parts = list(dict.fromkeys(part for arm in arms for part in arm.parts_ms))
    times = ["TTFT p50, ms", "TTFT p95, ms"] if absolute else []
    units = [f"{part}, ms" if absolute else f"{part}, share" for part in parts]
    header = ["arm", "TTFT over full prefill's", *times, *units]
    return markdown_table(header, [_time_row(arm, parts, absolute) for arm in arms])


def _fidelity_row(arm: ArmSummary) -> list[str]:
    measures = (arm.agreement, arm.kl_first, arm.kl_answer, arm.f1, arm.em, arm.token_f1)
    return [arm.name, f"{arm.recomputed_ratio:.1%}", *map(_interval, measures), str(arm.questions)]


def _time_row(arm: ArmSummary, parts: Sequence[str], absolute: bool) -> list[str]:
    times = [f"{arm.ttft_ms_p50:.1f}", f"{arm.ttft_ms_p95:.1f}"] if absolute else []
    unit = 1.0 if absolute else arm.ttft_ms_p50
    digits = 1 if absolute else 2
    values = [f"{arm.parts_ms[part] / unit:.{digits}f}" if part in arm.parts_ms else "" for part in parts]
    return [arm.name, f"{arm.full_ttft_share:.3f}", *times, *values]


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
