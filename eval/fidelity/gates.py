"""What must hold before a run's numbers mean anything, looked at on its first questions.

The reference engine is gated by the project's tests; an engine on another device, with another dtype, is gated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cacheblend.selectors import make_selector
from eval.errors import EvalError
from eval.fidelity.arms import FULL, FULL_AGAIN, Arm, Row
from eval.fidelity.bench import FidelityBench, LaidOutQuestion
from eval.fidelity.records import GateRecord, ResultLog
from eval.fidelity.run import build_chunks
from eval.scoring import agrees, first_line, first_line_ids
from eval.statistics import answer_divergence

GATED_QUESTIONS = 3
RECOMPUTE_ALL = Arm("recompute-all", make_selector("full"))
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Nats that a full prefill in other batches may differ by, whatever this run's noise floor is."""
NOISE_FLOORS = 3.0
BLANKED_AT_LEAST = 10.0
"""Tolerances that blanked chunks must differ by at least."""

_FULL, _AGAIN = Arm(FULL, None), Arm(FULL_AGAIN, make_selector("full"))


@dataclass(frozen=True, slots=True)
class GateSummary:
    """Means over the gated questions, in nats along full prefill's answer.

    Attributes:
        questions: how many.
        noise_floor: KL(full || full again).
        recompute_all: KL(full || every reused row recomputed).
        blanked: KL(full || the chunks' tokens replaced by a filler).
        answers_changed: of these questions, those that blanking gave another answer.
        tolerance: `recompute_all` may be this at most, and `blanked` must be `BLANKED_AT_LEAST` times this.
    """

    questions: int
    noise_floor: float
    recompute_all: float
    blanked: float
    answers_changed: int
    tolerance: float


def run_gates(bench: FidelityBench, questions: Sequence[LaidOutQuestion], log: ResultLog) -> Iterator[str]:
    """Measure what is missing on the first questions, and yield the name of each step before it is taken."""
    for question in questions[:GATED_QUESTIONS]:
        if question.example.id not in log.gates:
            yield f"{question.example.id}: gates"
            build_chunks(bench, question, log)
            log.append(_measure(bench, question))


def judge_gates(log: ResultLog, dtype: str) -> GateSummary | None:
    """What the gates found; None if none were looked at.

    Raises:
        EvalError: the engine's answers are not to be trusted.
    """
    records = list(log.gates.values())
    if not records:
        return None
    count = len(records)
    floor = sum(record.noise_floor for record in records) / count
    summary = GateSummary(
        questions=count,
        noise_floor=floor,
        recompute_all=sum(record.recompute_all for record in records) / count,
        blanked=sum(record.blanked for record in records) / count,
        answers_changed=sum(record.answer_changed for record in records),
        tolerance=max(TOLERANCE[dtype], NOISE_FLOORS * floor),
    )
    if not summary.recompute_all <= summary.tolerance:
        raise EvalError(
            f"Recomputing every row differs from full prefill by {summary.recompute_all:.1e} nats, more than the "
            f"{summary.tolerance:.1e} that batches explain: this engine blends wrongly here, and nothing was measured."
        )
    if summary.blanked < BLANKED_AT_LEAST * summary.tolerance or not summary.answers_changed:
        raise EvalError(
            f"Blanking the chunks changes {summary.answers_changed} of {count} answers and moves them by "
            f"{summary.blanked:.1e} nats: the contexts do not reach this model, and nothing was measured."
        )
    return summary


def _measure(bench: FidelityBench, question: LaidOutQuestion) -> GateRecord:
    blank = _blanked(bench, question)
    answer, text = _answer(bench, question)
    ((_, expected),) = bench.scores(question, [_FULL], answer)
    # Together, so that full prefill has other neighbours this time.
    both = dict(bench.scores(question, [_AGAIN, RECOMPUTE_ALL], answer))
    again, everything = (answer_divergence(expected, both[arm]).answer for arm in (_AGAIN, RECOMPUTE_ALL))
    ((_, without),) = bench.scores(blank, [_FULL], answer)
    blanked = answer_divergence(expected, without).answer
    changed = not agrees(_answer(bench, blank)[1], text)
    return GateRecord(question.example.id, again, everything, blanked, changed)


def _blanked(bench: FidelityBench, question: LaidOutQuestion) -> LaidOutQuestion:
    (filler, *_) = bench.tokenizer(".", add_special_tokens=False).input_ids
    return replace(question, chunks=tuple((filler,) * len(chunk) for chunk in question.chunks))


def _answer(bench: FidelityBench, question: LaidOutQuestion) -> tuple[list[int], str]:
    ((_, timed),) = bench.answers(question, [Row(_FULL, "warm")])
    ids = first_line_ids(bench.tokenizer, timed.outcome.token_ids)
    return ids, first_line(bench.tokenizer.decode(ids, skip_special_tokens=True))
