"""From records to what the report states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.fidelity.arms import FULL, FULL_AGAIN, Row
from eval.fidelity.comparisons import Comparison, compare
from eval.fidelity.gates import GateSummary
from eval.fidelity.records import AnswerRecord, ResultLog
from eval.fidelity.run import QUEUE
from eval.report.summary import ArmSummary
from eval.scoring import agrees
from eval.statistics import Interval, bootstrap_mean, paired_bootstrap, percentiles

BUSY_CORES = 1.7
BUSY_SHARE = 0.85
"""A run whose CPU time over wall time is below both `BUSY_CORES` and this share of its threads is void."""


@dataclass(frozen=True, slots=True)
class RowSummary:
    """One row of the report over all questions.

    Attributes:
        arm: scores, agreement, divergence, share recomputed and times.
        f1_difference, em_difference: official score minus full prefill's, paired by question.
        f1_where_full_is_right: mean official F1 on the questions that full prefill answers exactly; None if there
            are none.
        full_ttft_share_p95: 95th percentile of the time to first token over that of full prefill.
        prompt_tokens, reused_tokens, recomputed_tokens: means over questions.
        fallbacks: chunks prefilled although they should have been reused, by reason.
    """

    arm: ArmSummary
    f1_difference: Interval
    em_difference: Interval
    f1_where_full_is_right: float | None
    full_ttft_share_p95: float
    prompt_tokens: float
    reused_tokens: float
    recomputed_tokens: float
    fallbacks: dict[str, int]


@dataclass(frozen=True, slots=True)
class BuildSummary:
    """The offline work: chunks and tokens computed, bytes of KV a token takes, seconds.

    `full_prefill_share` is its time over full prefill's time to first token, both of the same questions.
    """

    chunks: int
    tokens: int
    bytes_per_token: int
    seconds: float
    full_prefill_share: float | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A whole run.

    Attributes:
        rows: in the order in which they were asked for.
        noise_floor: full prefill against itself, None if it was not asked for; it is among the rows.
        questions: how many.
        full_is_right: how many of them full prefill answers exactly.
        cpu_over_wall: CPU time over wall time of all answers; None where the model runs in other processes.
        busy_enough: the least `cpu_over_wall` with which timings count.
        timing_is_void: whether the machine or the engine was shared, so that timings mean nothing.
        build: the offline work.
        gates: what was looked at before; None where the project's tests do.
        comparisons: of the arms with one of them, if that was asked for.
        questions_with_primer_chunks: how many of the questions have a chunk that the primer consists of; None where
            chunks are encoded without one.
    """

    rows: tuple[RowSummary, ...]
    noise_floor: RowSummary | None
    questions: int
    full_is_right: int
    cpu_over_wall: float | None
    busy_enough: float
    timing_is_void: bool
    build: BuildSummary
    gates: GateSummary | None
    comparisons: tuple[Comparison, ...]
    questions_with_primer_chunks: int | None = None


def summarise(
    log: ResultLog,
    questions: Sequence[str],
    rows: Sequence[Row],
    bytes_per_token: int,
    threads: int,
    seed: int,
    gates: GateSummary | None = None,
    against: str | None = None,
) -> RunSummary:
    """Summarise a finished run.

    Args:
        log: holds every row's answer and every arm's divergence for each question.
        questions: their ids.
        rows: of the report, `full` among them.
        bytes_per_token: of KV.
        threads: the process computed with.
        seed: of the resampling.
        gates: what they found.
        against: an arm to compare the others with.
    """
    full = [log.answers[question, FULL, "warm"] for question in questions]
    summaries = {row: _summarise_row(log, row, rows, full, seed) for row in rows}
    answers = [log.answers[question, row.arm.name, row.tier] for question in questions for row in rows]
    wall_s = sum(answer.wall_s for answer in answers)
    busy = sum(answer.cpu_s for answer in answers) / wall_s if wall_s else None
    enough = min(BUSY_CORES, BUSY_SHARE * threads)
    return RunSummary(
        rows=tuple(summaries.values()),
        noise_floor=next((summary for row, summary in summaries.items() if row.arm.name == FULL_AGAIN), None),
        questions=len(questions),
        full_is_right=sum(answer.em == 1.0 for answer in full),
        cpu_over_wall=busy,
        busy_enough=enough,
        timing_is_void=busy is not None and busy < enough,
        build=_summarise_build(log, full, bytes_per_token),
        gates=gates,
        comparisons=() if against is None else compare(log, questions, rows, against, seed),
    )


def finished_questions(log: ResultLog, questions: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Those of which every row has answered and every arm has been scored."""
    return [
        question
        for question in questions
        if all((question, row.arm.name, row.tier) in log.answers for row in rows)
        and all((question, row.arm.name) in log.divergences for row in rows)
    ]


def row_name(row: Row, rows: Sequence[Row]) -> str:
    """The arm's name, with the tier where the arm has several rows."""
    several = sum(other.arm == row.arm for other in rows) > 1
    return f"{row.arm.name} ({row.tier})" if several else row.arm.name


def _summarise_row(log: ResultLog, row: Row, rows: Sequence[Row], full: list[AnswerRecord], seed: int) -> RowSummary:
    answers = [log.answers[record.question, row.arm.name, row.tier] for record in full]
    divergences = [log.divergences[record.question, row.arm.name] for record in full]
    times, full_times = (percentiles([a.ttft_ms for a in records]) for records in (answers, full))
    right = [answer.f1 for answer, reference in zip(answers, full, strict=True) if reference.em == 1.0]
    agreed = [float(agrees(a.text, reference.text)) for a, reference in zip(answers, full, strict=True)]
    arm = ArmSummary(
        name=row_name(row, rows),
        f1=bootstrap_mean([a.f1 for a in answers], seed=seed),
        em=bootstrap_mean([a.em for a in answers], seed=seed),
        token_f1=bootstrap_mean([a.token_f1 for a in answers], seed=seed),
        agreement=bootstrap_mean(agreed, seed=seed),
        kl_first=bootstrap_mean([d.kl_first for d in divergences], seed=seed),
        kl_answer=bootstrap_mean([d.kl_answer for d in divergences], seed=seed),
        recomputed_ratio=_mean([_recomputed_share(a) for a in answers]),
        ttft_ms_p50=times.p50,
        ttft_ms_p95=times.p95,
        parts_ms=_median_parts(answers),
        full_ttft_share=times.p50 / full_times.p50,
        questions=len(answers),
    )
    return RowSummary(
        arm=arm,
        f1_difference=paired_bootstrap([a.f1 for a in answers], [a.f1 for a in full], seed=seed),
        em_difference=paired_bootstrap([a.em for a in answers], [a.em for a in full], seed=seed),
        f1_where_full_is_right=_mean(right) if right else None,
        full_ttft_share_p95=times.p95 / full_times.p95,
        prompt_tokens=_mean([a.prompt_tokens for a in answers]),
        reused_tokens=_mean([a.reused_tokens for a in answers]),
        recomputed_tokens=_mean([a.recomputed_tokens for a in answers]),
        fallbacks=dict(Counter(reason for a in answers for reason in a.fallback_reasons)),
    )


def _recomputed_share(answer: AnswerRecord) -> float:
    """Full prefill reuses nothing, so its report states no ratio; every row of it is computed."""
    return answer.recomputed_ratio if answer.reused_tokens else 1.0


def _median_parts(answers: Sequence[AnswerRecord]) -> dict[str, float]:
    """Median milliseconds of each part; parts that take no time in any answer are left out.

    A blend's stages are those of the answers that came with some: on a GPU the shortest come without.
    """
    staged = [answer for answer in answers if answer.parts_ms.keys() - {QUEUE}]
    parts = dict.fromkeys(part for answer in answers for part in answer.parts_ms)
    medians = {
        part: percentiles([a.parts_ms.get(part, 0.0) for a in (answers if part == QUEUE else staged)]).p50
        for part in parts
    }
    return {part: median for part, median in medians.items() if median > 0}


def _summarise_build(log: ResultLog, full: Sequence[AnswerRecord], bytes_per_token: int) -> BuildSummary:
    builds = [log.builds[answer.question] for answer in full if answer.question in log.builds]
    seconds = sum(build.seconds for build in builds)
    prefill = sum(answer.ttft_ms for answer in full if answer.question in log.builds) / 1e3
    return BuildSummary(
        chunks=sum(build.chunks for build in builds),
        tokens=sum(build.tokens for build in builds),
        bytes_per_token=bytes_per_token,
        seconds=seconds,
        full_prefill_share=seconds / prefill if builds else None,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
