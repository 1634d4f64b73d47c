"""What the report states, against records worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval.errors import EvalError
from eval.fidelity.arms import Row, parse_arms, parse_tiers, report_rows
from eval.fidelity.comparisons import require_among
from eval.fidelity.gates import GateSummary
from eval.fidelity.outputs import report_notes, report_tables, summary_values
from eval.fidelity.records import AnswerRecord, BuildRecord, DivergenceRecord, ResultLog
from eval.fidelity.summary import RunSummary, finished_questions, summarise

QUESTIONS = ["q1", "q2", "q3", "q4"]
ROWS = report_rows(parse_arms("full,full-again,reuse"), parse_tiers("warm,cold"))
FULL_TEXTS = {"q1": "Paris", "q2": "the Seine", "q3": "1912", "q4": "Rome"}
FULL_F1 = {"q1": 1.0, "q2": 1.0, "q3": 0.0, "q4": 0.0}


def answer(question: str, row: Row, cpu_s: float) -> AnswerRecord:
    full = row.arm.is_reference
    cold = row.tier == "cold"
    text = FULL_TEXTS[question] if full else {"q2": "Seine!", "q3": "1912\n"}.get(question, "elsewhere")
    score = FULL_F1[question] if full else {"q1": 0.5, "q2": 1.0}.get(question, 0.0)
    return AnswerRecord(
        question=question,
        arm=row.arm.name,
        tier=row.tier,
        text=text,
        token_ids=[5],
        em=float(score == 1.0),
        f1=score,
        token_f1=score,
        ttft_ms=1000.0 if full else 400.0 if cold else 200.0,
        parts_ms={"queue and transfer": 200.0 if cold else 0.0, "question": 100.0},
        prompt_tokens=120,
        reused_tokens=0 if row.arm.name == "full" else 100,
        recomputed_tokens=100 if row.arm.name == "full-again" else 0,
        recomputed_ratio=1.0 if row.arm.name == "full-again" else 0.0,
        bytes_loaded={},
        fallback_reasons=["missing"] if cold and question == "q4" else [],
        cpu_s=cpu_s,
        wall_s=1.0,
    )


@pytest.fixture
def log(tmp_path: Path):
    with ResultLog(tmp_path / "records.jsonl") as log:
        yield log


def fill(log: ResultLog, cpu_s: float = 1.9) -> ResultLog:
    for number, question in enumerate(QUESTIONS):
        for row in ROWS:
            log.append(answer(question, row, cpu_s))
        for arm in dict.fromkeys(row.arm for row in ROWS):
            divergence = {"full": 0.0, "full-again": 1e-9}.get(arm.name, float(number))
            log.append(DivergenceRecord(question, arm.name, divergence, divergence / 2, 3))
    log.append(BuildRecord("q1", 2, 100, 4000, 0.5))
    log.append(BuildRecord("q3", 2, 100, 4000, 1.5))
    return log


def summary_of(log: ResultLog, threads: int = 2) -> RunSummary:
    return summarise(log, QUESTIONS, ROWS, bytes_per_token=40, threads=threads, seed=0)


def test_each_row_states_means_over_questions_and_agreement_ignores_case_articles_and_punctuation(log) -> None:
    full, again, warm, cold = summary_of(fill(log)).rows
    assert [row.arm.name for row in (full, again, warm, cold)] == ["full", "full-again", "reuse (warm)", "reuse (cold)"]
    assert (full.arm.agreement.mean, again.arm.agreement.mean, warm.arm.agreement.mean) == (1.0, 1.0, 0.5)
    assert (warm.arm.f1.mean, warm.arm.em.mean, warm.arm.kl_first.mean, warm.arm.kl_answer.mean) == (
        0.375,
        0.25,
        1.5,
        0.75,
    )
    assert cold.arm.kl_first == warm.arm.kl_first
    assert (full.arm.recomputed_ratio, again.arm.recomputed_ratio, warm.arm.recomputed_ratio) == (1.0, 1.0, 0.0)
    assert (full.reused_tokens, warm.reused_tokens, warm.prompt_tokens) == (0, 100, 120)


def test_scores_are_compared_with_full_prefill_question_by_question(log) -> None:
    full, _, warm, _ = summary_of(fill(log)).rows
    assert (warm.f1_difference.mean, warm.em_difference.mean) == (-0.125, -0.25)
    assert warm.f1_difference.high <= 0.0
    assert (full.f1_difference.low, full.f1_difference.high) == (0.0, 0.0)
    assert (full.f1_where_full_is_right, warm.f1_where_full_is_right) == (1.0, 0.75)


def test_times_are_shares_of_full_prefills_and_tiers_are_rows_of_their_own(log) -> None:
    summary = summary_of(fill(log))
    _, _, warm, cold = summary.rows
    assert (warm.arm.full_ttft_share, cold.arm.full_ttft_share, cold.full_ttft_share_p95) == (0.2, 0.4, 0.4)
    assert warm.arm.parts_ms == {"question": 100.0}
    assert cold.arm.parts_ms == {"queue and transfer": 200.0, "question": 100.0}
    assert cold.fallbacks == {"missing": 1}
    assert (summary.build.tokens, summary.build.seconds, summary.build.full_prefill_share) == (200, 2.0, 1.0)


def test_a_cpu_result_states_no_absolute_time(log) -> None:
    summary = summary_of(fill(log))
    text = json.dumps(summary_values(summary, absolute=False)) + report_tables(summary, [], absolute=False)
    assert "_ms" not in text
    assert "seconds" not in text
    assert ", ms" not in text
    text = json.dumps(summary_values(summary, absolute=True)) + report_tables(summary, [], absolute=True)
    assert '"ttft_ms_p95": 400.0' in text
    assert "took 2.0 seconds" in text


@pytest.mark.parametrize(
    ("cpu_s", "threads", "void"), [(1.9, 2, False), (1.6, 2, True), (1.8, 16, False), (0.9, 1, False), (0.8, 1, True)]
)
def test_timings_of_a_shared_machine_are_void_and_the_report_says_so(log, cpu_s, threads, void) -> None:
    summary = summary_of(fill(log, cpu_s), threads)
    assert summary.timing_is_void is void
    notes = report_notes(summary, {"tiers": ["warm"], "left_out": 0})
    assert any("void" in note for note in notes) is void
    assert ("(void" in report_tables(summary, notes, absolute=False)) is void


def test_arms_are_compared_with_one_of_them_question_by_question(log) -> None:
    rows = report_rows(parse_arms("full,reuse,query:0.15"), parse_tiers("warm"))
    for number, question in enumerate(QUESTIONS):
        for row in rows:
            text = FULL_TEXTS[question] if row.arm.name != "reuse" else "elsewhere"
            log.append(replace(answer(question, row, 1.9), text=text))
            kl = {"full": 0.0, "reuse": 1.0 + number, "query:0.15": 0.5}[row.arm.name]
            log.append(DivergenceRecord(question, row.arm.name, kl, kl / 2, 3))
    summary = summarise(log, QUESTIONS, rows, 40, 2, 0, None, "reuse")
    (query,) = summary.comparisons
    assert (query.arm, query.other) == ("query:0.15", "reuse")
    assert (query.agreement.mean, query.agreement.low) == (1.0, 1.0)
    assert (query.kl_first.mean, query.kl_answer.mean) == (-2.0, -1.0)
    assert query.kl_first.high < 0
    assert "| query:0.15 | +1.000 [+1.000, +1.000] |" in report_tables(summary, [], absolute=False)
    assert summarise(log, QUESTIONS, rows, 40, 2, 0).comparisons == ()
    with pytest.raises(EvalError, match=r"compared with 'deviation:0\.15', which is not among --arms"):
        require_among("deviation:0.15", rows)


def test_the_gates_and_requests_in_flight_are_stated_and_no_cpu_time_where_the_model_runs_elsewhere(log) -> None:
    for question in QUESTIONS:
        for row in ROWS:
            log.append(replace(answer(question, row, 0.0), wall_s=0.0))
            log.append(DivergenceRecord(question, row.arm.name, 0.0, 0.0, 3))
    gates = GateSummary(3, 1e-4, 2e-4, 3.0, 2, 2e-2)
    summary = summarise(log, QUESTIONS, ROWS, 40, 2, 0, gates)
    assert (summary.cpu_over_wall, summary.timing_is_void) == (None, False)
    notes = " ".join(report_notes(summary, {"tiers": ["warm"], "left_out": 0, "in_flight": 8}))
    assert "recomputing every row 2.0e-04 (at most 2.0e-02 allowed)" in notes
    assert "with 2 answers changed" in notes
    assert "one another's work and are void" in notes
    assert "CPU time" not in notes
    alone = " ".join(report_notes(summary, {"tiers": ["warm"], "left_out": 0, "in_flight": 1}))
    assert "idle engine" in alone


def test_only_questions_of_which_everything_is_there_are_finished(log) -> None:
    fill(log)
    assert finished_questions(log, [*QUESTIONS, "q5"], ROWS) == QUESTIONS
    del log.divergences["q2", "reuse"]
    del log.answers["q3", "reuse", "cold"]
    assert finished_questions(log, QUESTIONS, ROWS) == ["q1", "q4"]


def test_questions_left_out_and_the_noise_floor_are_stated(log) -> None:
    summary = summary_of(fill(log))
    assert summary.noise_floor is not None
    assert summary.noise_floor.arm.name == "full-again"
    notes = " ".join(report_notes(summary, {"tiers": ["warm", "cold"], "left_out": 3}))
    assert "3 questions were left out" in notes
    assert "2 of 4 questions exactly" in notes
    assert "noise floor" in notes
    assert "Cold chunks" in notes
