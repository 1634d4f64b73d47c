"""`python -m eval.musique` from end to end, with a tiny random model over the invented data."""

import json
import shutil
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.fidelity.arms import parse_arms
from eval.fidelity.reference_bench import ReferenceBench
from eval.musique import app
from inputs import INVENTED_PATH, load_invented
from pipelines.config import make_config

ARMS = "full,full-again,reuse,chunk_head:8,deviation:1.0,query:0.3"
QUESTIONS = 3


def call(model: Path, out: Path, *arguments: str, arms: str = ARMS, questions: int = QUESTIONS) -> Any:
    common = ["--model", str(model), "--out", str(out), "--arms", arms, "--questions", str(questions)]
    return CliRunner().invoke(app, [*common, "--max-tokens", "6", *arguments])


@pytest.fixture
def bench(model: Path):
    with closing(ReferenceBench(make_config(model=str(model), cache_dir=None, max_tokens=6))) as bench:
        yield bench


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def deeds(out: Path) -> list[tuple[str, ...]]:
    """What was done, in order: kind, question, arm and tier."""
    return [(r["record"], r["question"], r.get("arm", ""), r.get("tier", "")) for r in records(out)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model) -> tuple[Path, str]:
    """A finished run's folder and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    result = call(model, out)
    assert result.exit_code == 0, result.output
    return out, result.stdout


@pytest.fixture(scope="module")
def rows(finished) -> dict[str, dict[str, Any]]:
    """The report's rows by name."""
    return {row["name"]: row for row in json.loads((finished[0] / "result.json").read_text())["rows"]}


def test_full_prefill_agrees_with_itself_and_its_noise_floor_is_next_to_nothing(rows) -> None:
    for name in ("full", "full-again"):
        assert rows[name]["agreement"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
        assert rows[name]["kl_first"]["high"] < 1e-6
        assert rows[name]["kl_answer"]["high"] < 1e-6
        assert rows[name]["recomputed_ratio"] == 1.0


def test_an_arm_that_recomputes_everything_is_full_prefill(rows) -> None:
    assert rows["deviation:1.0"]["agreement"]["mean"] == 1.0
    assert rows["deviation:1.0"]["kl_answer"]["high"] < 1e-6
    assert rows["deviation:1.0"]["reused_tokens"] == rows["deviation:1.0"]["recomputed_tokens"] > 0


def test_plain_reuse_diverges_and_recomputing_some_rows_lessens_it(rows) -> None:
    assert rows["reuse"]["recomputed_tokens"] == 0
    assert rows["reuse"]["kl_answer"]["low"] > 1e-3
    assert 0 < rows["query:0.3"]["kl_answer"]["mean"] < rows["reuse"]["kl_answer"]["mean"]
    assert rows["query:0.3"]["recomputed_ratio"] == pytest.approx(0.3, abs=0.01)


def test_the_prompt_holds_the_questions_own_contexts_and_all_of_their_chunks_are_reused(finished, rows) -> None:
    builds = {r["question"]: r for r in records(finished[0]) if r["record"] == "build"}
    examples = {example.id: example for example in load_invented()[:QUESTIONS]}
    assert {name: build["chunks"] for name, build in builds.items()} == {
        name: len(example.contexts) for name, example in examples.items()
    }
    for record in records(finished[0]):
        if record["record"] == "answer" and record["arm"] == "reuse":
            assert record["reused_tokens"] == builds[record["question"]]["tokens"]
            assert record["bytes_loaded"] == {"host": builds[record["question"]]["bytes"]}
    assert all(row["fallbacks"] == {} for row in rows.values())


@pytest.mark.parametrize(
    "arm", parse_arms("full,full-again,reuse,chunk_head:8,deviation:0.3,query:0.3"), ids=lambda arm: arm.name
)
def test_a_forced_answer_is_scored_as_the_arm_itself_would_go_on(bench, arm) -> None:
    question = bench.lay_out(load_invented()[0])
    bench.build(question)
    answer = bench.answer(question, arm).outcome.token_ids
    scored = bench.score(question, arm, answer)
    assert scored.argmax(-1).tolist() == list(answer)
    # The answer has no say in which rows are recomputed for it.
    assert (bench.score(question, arm, answer[:1])[0] - scored[0]).abs().max() < 1e-3


def test_contexts_longer_than_a_chunk_are_cut_and_the_others_are_one_chunk_each(model) -> None:
    example = load_invented()[0]
    counts = {}
    for size in (1024, 40):
        with closing(ReferenceBench(make_config(model=str(model), cache_dir=None, chunk_tokens=size))) as bench:
            chunks = bench.lay_out(example).chunks
            texts = [bench.tokenizer.decode(chunk) for chunk in chunks]
        assert max(map(len, chunks)) <= size
        counts[size] = len(chunks)
        assert texts[0].startswith(f"{example.contexts[0].title}\n{example.contexts[0].text[:20]}")
    assert counts[1024] == len(example.contexts) < counts[40]


def test_the_order_of_arms_is_drawn_for_each_question_and_repeated_by_the_seed(finished, model, tmp_path) -> None:
    def orders(out: Path) -> list[list[str]]:
        done = [deed for deed in deeds(out) if deed[0] == "answer"]
        return [[arm for _, name, arm, _ in done if name == e.id] for e in load_invented()[:QUESTIONS]]

    assert len({tuple(order) for order in orders(finished[0])}) > 1
    assert call(model, tmp_path, questions=1).exit_code == 0
    assert orders(tmp_path)[0] == orders(finished[0])[0]


def test_the_report_states_model_device_versions_commit_seed_and_arguments_but_no_folder(finished, model) -> None:
    out, printed = finished
    result = json.loads((out / "result.json").read_text())
    assert result["model"]["name"] == "tiny"
    assert len(result["model"]["fingerprint"]) == 64
    assert result["device"]["kind"] == "cpu"
    assert {"python", "torch", "transformers"} <= result["versions"].keys()
    assert result["code"]["commit"]
    assert result["seed"] == 0
    assert result["data"]["name"] == INVENTED_PATH.name
    assert result["arguments"]["arms"] == ARMS
    assert result["settings"]["questions"] == QUESTIONS
    table = (out / "result.md").read_text()
    assert printed in table
    assert result["code"]["commit"] in table
    assert (out / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    for path in out.iterdir():
        if path.suffix != ".png":
            assert str(model.parent) not in path.read_text()
            assert str(out.parent) not in path.read_text()
            assert str(INVENTED_PATH.parent) not in path.read_text()


def test_the_tables_have_a_row_for_every_arm_and_the_data_text_stays_out_of_the_results(finished) -> None:
    table = (finished[0] / "result.md").read_text()
    for arm in ARMS.split(","):
        assert table.count(f"| {arm} |") == 3
    example = load_invented()[0]
    everything = "".join(path.read_text() for path in finished[0].iterdir() if path.suffix != ".png")
    assert example.question not in everything
    assert not any(context.text[:60] in everything for context in example.contexts)


def test_a_second_call_runs_nothing_again(finished, model, tmp_path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    before = (out / "records.jsonl").read_bytes()
    assert call(model, out).exit_code == 0
    assert (out / "records.jsonl").read_bytes() == before


def test_a_run_cut_off_in_the_middle_of_a_line_goes_on_there_and_comes_to_the_same(finished, model, tmp_path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    path = out / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    # Within the divergences of the second question.
    kept = next(n for n, deed in enumerate(deeds(out)) if deed[0] == "divergence" and deed[1].endswith("02")) + 2
    path.write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
    result = call(model, out)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"".join(lines[:kept]))
    assert sorted(deeds(out)) == sorted(deeds(finished[0]))
    fidelity = [(r["question"], r["arm"], r["kl_answer"]) for r in records(out) if r["record"] == "divergence"]
    wanted = [(r["question"], r["arm"], r["kl_answer"]) for r in records(finished[0]) if r["record"] == "divergence"]
    assert [f[:2] for f in fidelity] == [w[:2] for w in wanted]
    assert [f[2] for f in fidelity] == pytest.approx([w[2] for w in wanted], abs=1e-5)


def test_an_interrupt_loses_nothing_finished_and_says_how_to_go_on(model, tmp_path) -> None:
    out = tmp_path / "out"

    def interrupt_after_some_answers() -> None:
        while not (out / "records.jsonl").exists() or len(records_so_far(out)) < 4:
            time.sleep(0.005)
        signal.raise_signal(signal.SIGINT)

    def records_so_far(out: Path) -> list[bytes]:
        return (out / "records.jsonl").read_bytes().splitlines()

    watcher = threading.Thread(target=interrupt_after_some_answers)
    watcher.start()
    result = call(model, out, questions=QUESTIONS)
    watcher.join()
    assert result.exit_code == 130
    assert "goes on from there" in result.stderr
    kept = (out / "records.jsonl").read_bytes()
    assert kept.endswith(b"\n")
    assert call(model, out, questions=QUESTIONS).exit_code == 0
    assert (out / "records.jsonl").read_bytes().startswith(kept)
    assert len(set(deeds(out))) == len(deeds(out))


def test_other_settings_are_refused_and_fresh_begins_anew(finished, model, tmp_path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    refused = call(model, out, "--seed", "1")
    assert refused.exit_code == 2
    assert refused.stderr.strip().endswith(
        "holds results of other settings (seed); choose another --out or throw them away with --fresh."
    )
    assert (out / "records.jsonl").read_bytes() == (finished[0] / "records.jsonl").read_bytes()
    assert call(model, out, "--seed", "1", "--fresh", arms="reuse", questions=1).exit_code == 0
    assert {deed[2] for deed in deeds(out) if deed[0] == "answer"} == {"full", "reuse"}


def test_cold_chunks_come_from_disk_and_have_rows_of_their_own(model, tmp_path) -> None:
    result = call(
        model, tmp_path / "out", "--tiers", "warm,cold", "--cache-dir", str(tmp_path / "kv"), arms="reuse", questions=1
    )
    assert result.exit_code == 0, result.output
    rows = {(r["arm"], r["tier"]): r for r in records(tmp_path / "out") if r["record"] == "answer"}
    assert set(rows) == {("full", "warm"), ("reuse", "warm"), ("reuse", "cold")}
    assert rows["reuse", "warm"]["bytes_loaded"].keys() == {"host"}
    assert rows["reuse", "cold"]["bytes_loaded"].keys() == {"disk"}
    assert rows["reuse", "cold"]["token_ids"] == rows["reuse", "warm"]["token_ids"]
    assert "| reuse (cold) |" in result.stdout


def test_what_chunks_are_encoded_behind_changes_the_result(finished, model, tmp_path) -> None:
    assert call(model, tmp_path, "--prefix", "none", arms="reuse", questions=1).exit_code == 0
    first = load_invented()[0].id

    def divergence(out: Path) -> float:
        return next(
            r["kl_answer"]
            for r in records(out)
            if r["record"] == "divergence" and r["question"] == first and r["arm"] == "reuse"
        )

    assert divergence(tmp_path) != pytest.approx(divergence(finished[0]), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "nonsense"], "Arm 'nonsense' is unknown"),
        (["--tiers", "hot"], "Tiers 'hot' cannot be run"),
        (["--tiers", "cold"], "give --cache-dir"),
        (["--engine", "other"], "'engine'"),
        (["--engine-options", "{"], "is no JSON"),
        (["--engine-options", "[]"], "give an object"),
        (["--shard", "3/2"], "Shard '3/2' cannot be run"),
        (["--dtype", "int3"], "'dtype'"),
        (["--data", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--model", "./no-such-model"], "no-such-model"),
        (["--chunk-tokens", "0"], "'chunk_tokens'"),
        (["--max-tokens", "9000"], "No question fits"),
        (["--host-gib", "0"], "give --host-gib more than 0.00"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(model, tmp_path, arguments, message) -> None:
    result = call(model, tmp_path / "out", *arguments, arms="reuse", questions=1)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert line.endswith(".")
    assert "Traceback" not in result.output


def test_a_model_without_a_tokenizer_is_one_sentence_and_exit_code_2(without_tokenizer, tmp_path) -> None:
    result = call(without_tokenizer, tmp_path / "out", arms="reuse", questions=1)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "bare holds no tokenizer; save one there" in result.stderr


def test_results_go_to_a_folder_named_after_the_data_unless_another_is_named(model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", str(model), "--arms", "reuse", "--questions", "1", "--max-tokens", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "results" / INVENTED_PATH.stem / "result.json").exists()
