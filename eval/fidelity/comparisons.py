"""Arms against one arm that is named, paired by question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.errors import EvalError
from eval.fidelity.arms import FULL, Row
from eval.fidelity.records import ResultLog
from eval.scoring import agrees
from eval.statistics import Interval, paired_bootstrap


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm's values minus those of `other`, means over questions with 95 % intervals of the paired differences.

    A higher `agreement` and a lower KL speak for `arm`.
    """

    arm: str
    other: str
    agreement: Interval
    kl_first: Interval
    kl_answer: Interval


def require_among(other: str | None, rows: Sequence[Row]) -> None:
    """Refuse a comparison with an arm that is not run.

    Raises:
        EvalError: naming it.
    """
    if other is not None and other not in {row.arm.name for row in rows}:
        raise EvalError(f"Arms cannot be compared with '{other}', which is not among --arms; add it there.")


def compare(
    log: ResultLog, questions: Sequence[str], rows: Sequence[Row], other: str, seed: int
) -> tuple[Comparison, ...]:
    """Every arm that is no full prefill against `other`, each in the first of the tiers it was run in."""
    tiers = {row.arm.name: row.tier for row in reversed(rows)}
    arms = dict.fromkeys(row.arm.name for row in rows if not row.arm.is_reference and row.arm.name != other)

    def agreed(arm: str) -> list[float]:
        pairs = [(log.answers[name, arm, tiers[arm]], log.answers[name, FULL, "warm"]) for name in questions]
        return [float(agrees(answer.text, full.text)) for answer, full in pairs]

    def first(arm: str) -> list[float]:
        return [log.divergences[name, arm].kl_first for name in questions]

    def along(arm: str) -> list[float]:
        return [log.divergences[name, arm].kl_answer for name in questions]

    def difference(values: Callable[[str], list[float]], arm: str) -> Interval:
        return paired_bootstrap(values(arm), values(other), seed=seed)

    return tuple(
        Comparison(arm, other, difference(agreed, arm), difference(first, arm), difference(along, arm)) for arm in arms
    )
