"""`precompute-chunk-cache`: what it takes, what it skips, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from inputs import INVENTED_PATH, distinct_contexts, load_examples

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# A shell's background jobs inherit an ignored SIGINT; a terminal's do not.
RUN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import pipelines.cli.precompute as p; "


@pytest.fixture
def precompute(cli: Any, tiny_options: list[str]) -> Any:
    """Runs the command with --json and returns what it printed, and its exit code."""

    def run(*args: object, exit_code: int = 0) -> dict[str, Any]:
        result = cli("precompute-chunk-cache", *args, *tiny_options, "--json")
        assert result.exit_code == exit_code, result.stderr
        return json.loads(result.stdout)

    return run


def write_jsonl(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


def test_a_second_run_finds_every_chunk_cached(precompute: Any) -> None:
    first = precompute("inputs/data/demo")
    assert first["computed"] == first["distinct"] > 0
    second = precompute("inputs/data/demo")
    assert (second["cached"], second["computed"]) == (first["distinct"], 0)


def test_only_what_was_added_is_computed(precompute: Any, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", {"text": "The first."})
    assert precompute(file)["computed"] == 1
    write_jsonl(file, {"text": "The first."}, {"text": "The second."})
    again = precompute(file)
    assert (again["cached"], again["computed"]) == (1, 1)


def test_a_dry_run_computes_nothing_and_says_what_would_be(precompute: Any, tmp_path: Path) -> None:
    dry = precompute("inputs/data/demo/salt-cake.md", "--dry-run")
    assert dry["dry_run"]
    assert not list((tmp_path / "kv").rglob("*.safetensors"))
    wet = precompute("inputs/data/demo/salt-cake.md")
    assert (dry["computed"], dry["kv_bytes"]) == (wet["computed"], wet["kv_bytes"])
    assert wet["computed"] == 1


def test_question_files_give_their_distinct_contexts(precompute: Any, tmp_path: Path) -> None:
    contexts = distinct_contexts(load_examples(INVENTED_PATH))
    assert precompute(INVENTED_PATH, "--dry-run")["documents"] == len(contexts)
    question = {"question": "Who?", "answers": ["Ada"], "ctxs": [{"title": "T", "text": "Ada did."}]}
    array = tmp_path / "cacheblend.json"
    array.write_text(json.dumps([question, question]), encoding="utf-8")
    assert precompute(array, "--dry-run")["documents"] == 1


def test_a_folder_gives_its_documents_and_its_questions_and_passes_over_the_rest(precompute: Any) -> None:
    contexts = len(distinct_contexts(load_examples(INVENTED_PATH)))
    documents = len(list((REPOSITORY / "inputs/data/demo").iterdir()))
    assert precompute("inputs/data", "--dry-run")["documents"] == contexts + documents + 1  # demo_questions.txt


def test_files_of_one_name_in_two_folders_are_two_documents(precompute: Any, tmp_path: Path) -> None:
    for folder, text in (("a", "One text."), ("b", "Another text.")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "notes.txt").write_text(text, encoding="utf-8")
    assert precompute(tmp_path / "a" / "notes.txt", tmp_path / "b" / "notes.txt")["computed"] == 2


def test_every_chunk_identical_is_computed_once(precompute: Any, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", *({"id": str(n), "text": "All the same."} for n in range(9)))
    summary = precompute(file)
    assert (summary["chunks"], summary["distinct"], summary["computed"]) == (9, 1, 1)


@pytest.mark.parametrize(
    "text",
    ["x", "\N{SLICE OF PIZZA}\N{FAMILY} piñata", "שלום עולם, مرحبا", "before\0after", "\N{ZERO WIDTH JOINER}"],
    ids=["one token", "emoji", "right to left", "NUL", "joiner"],
)
def test_any_text_is_cached_in_chunks_of_any_size(precompute: Any, tmp_path: Path, text: str) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", {"text": text})
    summary = precompute(file)
    assert summary["computed"] == 1
    assert summary["tokens"] >= 1


def test_chunks_of_one_token_are_cached(precompute: Any, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", {"text": "one two three four"})
    summary = precompute(file, "--chunk-tokens", 1)
    assert summary["tokens"] == summary["computed"] == 4


def test_another_prefix_or_dtype_is_another_cache_entry(precompute: Any) -> None:
    document = "inputs/data/demo/salt-cake.md"
    for option in ([], ["--prefix", "bos"], ["--prefix", "none"], ["--dtype", "bfloat16"], ["--system-prompt", "Hm."]):
        assert precompute(document, *option)["computed"] == 1, option


def test_the_summary_is_on_stdout_and_progress_on_stderr(cli: Any, tiny_options: list[str]) -> None:
    result = cli("precompute-chunk-cache", "inputs/data/demo", *tiny_options)
    assert result.exit_code == 0
    assert re.search(r"computed\W+6 ", result.stdout)
    assert "Precomputing" not in result.stdout
    assert re.search(r"Precomputing.* 6/6 chunks +[\d,]+ tokens/s +[\d.]+ [KM]iB", result.stderr)


@pytest.fixture(scope="module")
def run_on_a_full_disk(tiny_rag_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A process that precomputes a chunk, can write no file of its size, and ends with what it had imported."""
    code = (
        "import resource, sys, pipelines.cli.precompute as p\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))\n"
        "try: p.run()\n"
        "finally: print('imported', *sys.modules)"
    )
    options = ["--model", str(tiny_rag_model), "--cache-dir", str(tmp_path_factory.mktemp("full") / "kv")]
    args = [sys.executable, "-c", code, "inputs/data/demo/salt-cake.md", *options]
    return subprocess.run(args, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_a_disk_that_takes_no_chunk_is_reported_and_ends_with_1(run_on_a_full_disk: Any) -> None:
    assert run_on_a_full_disk.returncode == 1, run_on_a_full_disk.stderr
    assert re.search(r"not kept on disk\W+1 \(disk_full\)", run_on_a_full_disk.stdout)
    assert "Traceback" not in run_on_a_full_disk.stderr


def test_precomputing_does_not_even_import_an_embedder(run_on_a_full_disk: Any) -> None:
    imported = run_on_a_full_disk.stdout.splitlines()[-1].split()
    assert "pipelines.rag" in imported
    assert not {"sentence_transformers", "retrieval.embedding"}.intersection(imported)


def test_an_interrupted_run_says_how_far_it_came_and_the_next_one_goes_on(
    precompute: Any, tiny_options: list[str], tmp_path: Path
) -> None:
    total = 1500
    file = write_jsonl(tmp_path / "d.jsonl", *({"text": f"Document {n}: " + "word " * 60} for n in range(total)))
    process = subprocess.Popen(
        [sys.executable, "-c", RUN + "p.run()", str(file), *tiny_options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    while process.poll() is None and not any((tmp_path / "kv").glob("*/*.safetensors")):
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("Interrupted")]
    match = re.fullmatch(rf"Interrupted: (\d+) of {total} chunks are cached; run the same command .*\.", line)
    assert match, line
    done = int(match[1])
    assert 1 <= done < total
    assert len(list((tmp_path / "kv").glob("*/*.safetensors"))) == done
    rest = precompute(file, "--dry-run")
    assert (rest["cached"], rest["computed"]) == (done, total - done)
