"""Runs every row of the report over every question, going on where an earlier run stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from eval.fidelity.arms import PREFIX_CACHED, Arm, Row
from eval.fidelity.bench import FidelityBench, LaidOutQuestion, TimedAnswer
from eval.fidelity.records import AnswerRecord, BuildRecord, DivergenceRecord, ResultLog
from eval.scoring import exact_match, f1, first_line, first_line_ids, token_f1
from eval.statistics import answer_divergence

QUEUE = "queue and transfer"
"""The part of the time to first token before the prefill: scheduling, and chunks that come from disk."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is: questions and results (answers and divergences) done, and what is being done."""

    questions_done: int
    questions: int
    results_done: int
    results: int
    doing: str


def run_questions(
    bench: FidelityBench,
    questions: Sequence[LaidOutQuestion],
    rows: Sequence[Row],
    log: ResultLog,
    seed: int,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
    time_is_up: Callable[[], bool] = lambda: False,
) -> None:
    """Answer and score what `log` does not hold yet; each result is in the log as soon as it is there.

    A question's chunks are computed before anything is timed, its rows answer in an order drawn for it, and
    divergences are measured after the answers. One untimed answer warms up.

    Args:
        bench: the model.
        questions: what to ask; ids are unique.
        rows: `full` among them.
        log: receives the results.
        seed: of the orders.
        on_progress: called before each result, and at the end.
        time_is_up: asked before each question; the run ends there once it says so.
    """
    run = _Run(bench, rows, log, seed)
    total = len(questions) * (len(rows) + len(run.arms))
    for done, question in enumerate(questions):
        if time_is_up():
            return
        for doing in run.steps(question):
            results = len(log.answers) + len(log.divergences)
            on_progress(RunProgress(done, len(questions), results, total, f"{question.example.id}: {doing}"))
    on_progress(RunProgress(len(questions), len(questions), total, total, "done"))


def build_chunks(bench: FidelityBench, question: LaidOutQuestion, log: ResultLog) -> None:
    """Compute the question's chunks that are missing, and note what that took unless it is noted already."""
    built = bench.build(question)
    if built.computed and question.example.id not in log.builds:
        counts = (built.computed, built.tokens_computed, built.kv_bytes)
        log.append(BuildRecord(question.example.id, *counts, built.seconds))


class _Run:
    def __init__(self, bench: FidelityBench, rows: Sequence[Row], log: ResultLog, seed: int) -> None:
        self._bench = bench
        self._rows = rows
        self._log = log
        self._seed = seed
        self._warm = False
        self.arms = tuple(dict.fromkeys(row.arm for row in rows))

    def steps(self, question: LaidOutQuestion) -> Iterator[str]:
        """Do what is missing for a question, and yield the name of each step before it is taken."""
        name = question.example.id
        answers = [row for row in self._order(name) if (name, row.arm.name, row.tier) not in self._log.answers]
        arms = [arm for arm in self.arms if (name, arm.name) not in self._log.divergences]
        if not answers and not arms:
            return
        yield "chunks"
        self._make_ready(question)
        yield "answers"
        for row, timed in self._bench.answers(question, answers):
            self._log.append(_answer_record(self._bench.tokenizer, question, row, timed))
            yield f"{row.arm.name} has answered"
        yield from self._measure_divergences(question, arms)
        self._bench.forget(question)

    def _order(self, name: str) -> list[Row]:
        """The rows in an order of their own for each question, the same in every run with this seed.

        Where prefixes are cached, the prompt is new when it is asked so: other full prefills would have left it there.
        """
        rows = list(self._rows)
        random.Random(f"{self._seed}:{name}").shuffle(rows)
        return sorted(rows, key=lambda row: row.arm.name != PREFIX_CACHED)

    def _make_ready(self, question: LaidOutQuestion) -> None:
        build_chunks(self._bench, question, self._log)
        if not self._warm:
            self._bench.warm_up(question)
            self._warm = True

    def _measure_divergences(self, question: LaidOutQuestion, arms: Sequence[Arm]) -> Iterator[str]:
        if not arms:
            return
        full = self.arms[0]
        answer = self._log.answers[question.example.id, full.name, "warm"].token_ids
        yield f"{full.name} is scored"
        ((_, expected),) = self._bench.scores(question, [full], answer)
        # Full prefill is not run a third time: how far it differs from itself is what `full-again` measures.
        others = self._bench.scores(question, [arm for arm in arms if arm != full], answer)
        for arm, scored in chain([(full, expected)] if full in arms else [], others):
            divergence = answer_divergence(expected, scored)
            record = DivergenceRecord(question.example.id, arm.name, divergence.first, divergence.answer, len(answer))
            self._log.append(record)
            yield f"{arm.name} is scored"


def _answer_record(tokenizer: Any, question: LaidOutQuestion, row: Row, timed: TimedAnswer) -> AnswerRecord:
    outcome, gold = timed.outcome, question.example.answers
    assert outcome.ttft_ms is not None
    token_ids = first_line_ids(tokenizer, outcome.token_ids)
    text = first_line(tokenizer.decode(token_ids, skip_special_tokens=True))
    return AnswerRecord(
        question=question.example.id,
        arm=row.arm.name,
        tier=row.tier,
        text=text,
        token_ids=token_ids,
        em=exact_match(text, gold),
        f1=f1(text, gold),
        token_f1=token_f1(text, gold, tokenizer),
        ttft_ms=outcome.ttft_ms,
        parts_ms={QUEUE: outcome.queue_ms, **outcome.report.parts_ms},
        prompt_tokens=question.length,
        reused_tokens=outcome.report.reused_tokens,
        recomputed_tokens=outcome.report.recomputed_tokens,
        recomputed_ratio=outcome.report.recomputed_ratio,
        bytes_loaded=dict(outcome.report.bytes_loaded),
        fallback_reasons=list(outcome.report.fallback_reasons),
        cpu_s=timed.cpu_s,
        wall_s=timed.wall_s,
    )
