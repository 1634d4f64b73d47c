"""`python -m eval.musique --primer-tokens`: chunks encoded behind a primer of the data, the same for every question."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.fidelity.arms import Arm, parse_arms
from eval.fidelity.priming import Priming
from eval.fidelity.reference_bench import ReferenceBench
from eval.musique import app
from eval.statistics import answer_divergence
from inputs import distinct_contexts, load_invented
from kvstore.tiers import Tier
from pipelines.config import make_config

QUESTIONS = 4
FULL, REUSE = parse_arms("full,reuse")


def call(model: Path, out: Path, *arguments: str) -> Any:
    common = ["--model", str(model), "--out", str(out), "--arms", "full,reuse,query:0.15"]
    return CliRunner().invoke(app, [*common, "--questions", str(QUESTIONS), "--max-tokens", "4", *arguments])


def result_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def divergences(result: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["kl_answer"]["mean"] for row in result["rows"]}


@pytest.fixture(scope="module")
def primed(tmp_path_factory, model) -> tuple[Path, str]:
    """A primed run's folder, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "primed"
    result = call(model, out, "--primer-tokens", "500")
    assert result.exit_code == 0, result.output
    return out, result.stdout


@pytest.fixture(scope="module")
def unprimed(tmp_path_factory, model) -> Path:
    """The folder of the same run without a primer."""
    out = tmp_path_factory.mktemp("runs") / "unprimed"
    assert call(model, out).exit_code == 0
    return out


@pytest.fixture
def make_bench(model):
    benches = []

    def make(tokens: int, **config: Any) -> ReferenceBench:
        priming = Priming(distinct_contexts(load_invented()), tokens)
        benches.append(closing(ReferenceBench(make_config(model=str(model), cache_dir=None, **config), priming)))
        return benches[-1].thing

    yield make
    for bench in benches:
        bench.__exit__()


def test_every_chunk_is_reused_from_behind_the_primer_and_that_changes_what_reuse_gives(primed, unprimed) -> None:
    with_it, without = result_of(primed[0]), result_of(unprimed)
    assert all(row["fallbacks"] == {} for row in with_it["rows"])
    for row, other in zip(with_it["rows"], without["rows"], strict=True):
        assert row["reused_tokens"] == other["reused_tokens"]
    assert divergences(with_it)["full"] == divergences(without)["full"] == 0.0
    assert divergences(with_it)["reuse"] != pytest.approx(divergences(without)["reuse"], rel=1e-3)


def test_a_chunk_that_follows_the_primer_in_the_prompt_is_reused_exactly(make_bench) -> None:
    bench = make_bench(150)
    (passage,) = bench.prefixes.primer_chunks
    question = bench.lay_out(load_invented()[0])
    behind = replace(question, chunks=(passage, next(chunk for chunk in question.chunks if chunk != passage)))
    elsewhere = replace(behind, chunks=behind.chunks[::-1])

    def divergence(question: Any, arm: Arm) -> float:
        bench.build(question)
        assert bench.answer(question, arm).outcome.report.reused_tokens == sum(map(len, question.chunks))
        return answer_divergence(bench.score(question, FULL, [5, 6]), bench.score(question, arm, [5, 6])).answer

    assert divergence(behind, REUSE) < 1e-6 < 1e-3 < divergence(elsewhere, REUSE)


def test_chunks_of_the_primer_are_stored_behind_the_head_and_all_others_behind_head_and_primer(make_bench) -> None:
    bench = make_bench(500)
    assert len(bench.prefixes.primer_chunks) > 1
    questions = [bench.lay_out(example) for example in load_invented()]
    (question, *_) = [question for question in questions if bench.has_primer_chunk(question)]
    bench.build(question)
    identities = bench._identities(question)
    assert {identity.prefix_ids for identity in identities} == {question.head, question.head + bench.prefixes.primer}
    for identity in identities:
        assert (identity.prefix_ids == question.head) == (identity.token_ids in bench.prefixes.primer_chunks)
        assert bench._store.lookup(identity) is Tier.HOST


def test_the_primer_is_of_all_contexts_of_the_data_whichever_questions_are_asked(primed, model, tmp_path) -> None:
    assert call(model, tmp_path / "one", "--primer-tokens", "500", "--questions", "1").exit_code == 0
    primer = result_of(tmp_path / "one")["settings"]["primer"]
    assert primer == result_of(primed[0])["settings"]["primer"]
    assert 0 < primer["tokens"] <= primer["at_most"] == 500


def test_the_report_states_the_primer_and_how_many_questions_have_a_context_in_it(primed, make_bench) -> None:
    out, printed = primed
    bench = make_bench(500)
    having = sum(bench.has_primer_chunk(bench.lay_out(example)) for example in load_invented()[:QUESTIONS])
    assert result_of(out)["questions_with_primer_chunks"] == having
    primer = f"a primer of {len(bench.prefixes.primer)} tokens"
    assert f"behind the prefix and {primer} (whole chunks of the data: {len(bench.prefixes.primer_chunks)})" in printed
    assert f"{having} of {QUESTIONS} questions have a context that is part of it" in printed
    assert f"chunks behind the prefix `system` and {primer}, seed" in (out / "result.md").read_text()


def test_a_run_without_a_primer_says_nothing_of_one(unprimed) -> None:
    assert result_of(unprimed)["settings"]["primer"] is None
    assert result_of(unprimed)["questions_with_primer_chunks"] is None
    assert "a primer" not in (unprimed / "result.md").read_text()


def test_primed_and_unprimed_results_and_those_of_other_primers_are_never_mixed(primed, unprimed, model) -> None:
    for out, tokens in ((primed[0], 0), (primed[0], 300), (unprimed, 500)):
        before = (out / "records.jsonl").read_bytes()
        refused = call(model, out, "--primer-tokens", str(tokens))
        assert refused.exit_code == 2
        assert "primer); choose another --out" in refused.stderr
        assert (out / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize("prefix", ["bos", "none"])
def test_a_primer_follows_whatever_prefix_chunks_are_encoded_behind(make_bench, prefix) -> None:
    bench = make_bench(500, prefix=prefix)
    question = bench.lay_out(load_invented()[0])
    head = () if prefix == "none" else (bench.tokenizer.bos_token_id,)
    assert head + bench.prefixes.primer in {identity.prefix_ids for identity in bench._identities(question)}
    assert bench.build(question).not_kept == 0


def test_a_primer_that_no_chunk_fits_into_is_one_sentence_and_exit_code_2(model, tmp_path) -> None:
    result = call(model, tmp_path / "out", "--primer-tokens", "5")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "not one fits; give other --primer-tokens" in result.stderr
