"""Bad input: one sentence on stderr, exit code 2, nothing on stdout, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from pipelines.cli.failures import ends_with_a_sentence

REPOSITORY = Path(__file__).parents[2]
DEMO = "inputs/data/demo/salt-cake.md"


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


BAD_DOCUMENTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing file": (lambda tmp: tmp / "none.txt", "none.txt does not exist"),
    "empty file": (lambda tmp: written(tmp / "empty.txt", ""), "empty.txt is empty"),
    "empty jsonl": (lambda tmp: written(tmp / "empty.jsonl", "\n\n"), "empty.jsonl is empty"),
    "empty json": (lambda tmp: written(tmp / "empty.json", ""), "empty.json: the file is empty"),
    "empty list": (lambda tmp: written(tmp / "none.json", "[]"), "none.json: the JSON array is empty"),
    "empty folder": (lambda tmp: tmp, "holds no .txt, .md or .jsonl file"),
    "binary file": (lambda tmp: written(tmp / "b.txt", b"\x89PNG\0\0"), "b.txt is a binary file"),
    "other encoding": (lambda tmp: written(tmp / "l.txt", b"caf\xe9"), "l.txt is not UTF-8 at byte 3"),
    "other kind": (lambda tmp: written(tmp / "a.pdf", "x"), "a.pdf is of a kind that is not read"),
    "malformed jsonl": (
        lambda tmp: written(tmp / "m.jsonl", '{"text": "a"}\n{"text": '),
        "m.jsonl line 2 is malformed",
    ),
    "malformed json": (lambda tmp: written(tmp / "m.json", "[\n{,\n]"), "m.json, line 2"),
    "other shape": (lambda tmp: written(tmp / "s.json", '{"rows": []}'), "s.json, line 1: unknown shape"),
    "no text": (
        lambda tmp: written(tmp / "t.jsonl", '{"title": "a"}'),
        't.jsonl line 1 is not an object with a "text"',
    ),
    "blank text": (lambda tmp: written(tmp / "t.jsonl", '{"id": "a", "text": " "}'), "document 'a' has no text"),
    "one id for two texts": (
        lambda tmp: written(tmp / "i.jsonl", '{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}'),
        "i.jsonl line 2 uses the id 'a' of another document",
    ),
}

BAD_OPTIONS = {
    "ratio above 1": (["--ratio", "1.5"], "1.5"),
    "ratio below 0": (["--ratio", "-0.1"], "-0.1"),
    "ratio not a number": (["--ratio", "nan"], "nan"),
    "ratio of a selector without one": (["--selector", "none", "--ratio", "0.5"], "takes no ratio"),
    "unknown fidelity": (["--fidelity", "perfect"], "Setting 'fidelity' cannot be 'perfect': Input should be 'fast'"),
    "fidelity beside a ratio": (
        ["--fidelity", "fast", "--ratio", "0.3"],
        "error: Fidelity 'fast' and ratio 0.3 are both given; give one of them.",
    ),
    "fidelity of a selector without a ratio": (["--selector", "none", "--fidelity", "fast"], "takes no fidelity"),
    "unknown selector": (["--selector", "best"], "Selector 'best' is unknown; use one of none, chunk_head"),
    "unknown policy": (["--policy", "lazy"], "Setting 'policy' cannot be 'lazy'"),
    "unknown engine": (["--engine", "steam"], "Setting 'engine' cannot be 'steam'"),
    "unknown dtype": (["--dtype", "int4"], "Setting 'dtype' cannot be 'int4'"),
    "unknown prefix": (["--prefix", "all"], "Setting 'prefix' cannot be 'all'"),
    "chunks of no tokens": (["--chunk-tokens", "0"], "Setting 'chunk_tokens' cannot be 0"),
    "overlap as long as a chunk": (["--chunk-tokens", "8", "--chunk-overlap", "8"], "an overlap of 8 tokens"),
    "no chunks to retrieve": (["--top-k", "0"], "Setting 'top_k' cannot be 0"),
    "no tokens to answer with": (["--max-tokens", "0"], "Setting 'max_tokens' cannot be 0"),
    "negative temperature": (["--temperature", "-1"], "temperature is -1.0"),
    "empty stop text": (["--stop", ""], "A stop string is empty"),
    "unknown bundled model": (["--model", "bundled:gpt"], "There is no bundled model 'bundled:gpt'"),
}


@pytest.fixture
def refused(cli: Any, tiny_options: list[str]) -> Any:
    """Runs a command that must be refused, and returns its sentence."""

    def run(command: str, *args: object) -> str:
        options = [] if "--model" in args else tiny_options[:2]
        return sentence_of(cli(command, *args, *options, *tiny_options[2:]))

    return run


def sentence_of(result: Any) -> str:
    code = getattr(result, "returncode", None) if hasattr(result, "returncode") else result.exit_code
    assert code == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert sentence == result.stderr.splitlines()[-1]
    assert sentence.endswith(".")
    return sentence


@pytest.mark.parametrize("case", BAD_DOCUMENTS)
def test_a_document_that_cannot_be_used_is_named(refused: Any, tmp_path: Path, case: str) -> None:
    make, expected = BAD_DOCUMENTS[case]
    path = make(tmp_path)
    assert expected in refused("precompute-chunk-cache", DEMO, path)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_an_option_that_cannot_be_used_is_named(refused: Any, case: str) -> None:
    options, expected = BAD_OPTIONS[case]
    assert expected in refused("cacheblend", "ask", "Who?", "--docs", DEMO, "--no-retrieval", *options)


def test_an_engine_that_is_not_there_is_refused(refused: Any) -> None:
    sentence = refused("cacheblend", "ask", "Who?", "--docs", DEMO, "--engine", "vllm")
    # Where it is installed, it does not take the tiny model's narrow heads.
    assert "Engine 'vllm' is not installed" in sentence or "Engine 'vllm' cannot serve this model" in sentence
    assert "use the engine `reference`" in sentence


@pytest.mark.parametrize("question", ["", "  \n\t "])
def test_an_empty_question_is_refused(refused: Any, question: str) -> None:
    assert "The question is empty" in refused("cacheblend", "ask", question, "--docs", DEMO)


def test_a_question_longer_than_the_context_is_refused_with_the_numbers(refused: Any) -> None:
    sentence = refused("cacheblend", "ask", "why " * 5000, "--docs", DEMO)
    assert "do not fit the model's context of 4096" in sentence


def test_documents_longer_than_the_context_are_refused_with_the_numbers(refused: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "long.txt", "A sentence of some words. " * 1000)
    sentence = refused("cacheblend", "ask", "Why?", "--docs", file, "--no-retrieval")
    assert "do not fit the model's context of 4096" in sentence


def test_chunks_longer_than_the_context_are_refused_before_anything_is_computed(refused: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "long.txt", "A sentence of some words. " * 1000)
    sentence = refused("precompute-chunk-cache", file, "--chunk-tokens", 5000)
    assert "does not fit the model's context of 4096" in sentence


def test_an_id_used_for_two_texts_in_two_files_is_refused(refused: Any, tmp_path: Path) -> None:
    files = [written(tmp_path / f"{n}.jsonl", json.dumps({"id": "same", "text": f"text {n}"})) for n in range(2)]
    assert "'same' is used for two different texts" in refused("precompute-chunk-cache", *files)


def test_a_cache_folder_that_is_a_file_is_refused_and_the_file_is_kept(
    cli: Any, tiny_options: list[str], tmp_path: Path
) -> None:
    file = written(tmp_path / "file", "precious")
    model = tiny_options[:2]
    for args in (
        ("precompute-chunk-cache", DEMO, *model),
        ("cacheblend", "ask", "Who?", "--docs", DEMO, *model),
        ("cacheblend", "cache", "ls"),
        ("cacheblend", "cache", "verify"),
        ("cacheblend", "cache", "prune"),
    ):
        assert f"The cache folder {file} is, or lies below, a file" in sentence_of(cli(*args, "--cache-dir", file))
    assert file.read_text() == "precious"


def test_a_model_folder_without_its_parts_is_refused(refused: Any, tiny_options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert "holds no config.json" in refused("precompute-chunk-cache", DEMO, "--model", folder)
    (folder / "config.json").write_bytes((Path(tiny_options[1]) / "config.json").read_bytes())
    assert "holds no tokenizer" in refused("precompute-chunk-cache", DEMO, "--model", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(tiny_options[1]) / name).read_bytes())
    assert "could not be loaded" in refused("precompute-chunk-cache", DEMO, "--model", folder)


@pytest.mark.parametrize("command", [("precompute-chunk-cache",), ("cacheblend", "ask", "Who?", "--docs")])
def test_a_name_longer_than_the_system_takes_is_refused_in_a_sentence(refused: Any, command: tuple[str, ...]) -> None:
    assert "n" * 300 + ".md" in refused(*command, "n" * 300 + ".md")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a/b.md"), "a/b.md cannot be used: Permission denied."),
        (OSError(errno.ENOSPC, "No space left on device"), "The operating system refused: No space left on device."),
    ],
)
def test_what_the_system_refuses_is_one_sentence_with_the_file_and_the_reason(
    capsys: pytest.CaptureFixture[str], error: OSError, sentence: str
) -> None:
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        ends_with_a_sentence(command)()
    assert ended.value.exit_code == 2
    assert capsys.readouterr() == ("", f"error: {sentence}\n")


def test_a_reader_that_has_left_is_no_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        ends_with_a_sentence(command)()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "args",
    [
        ("precompute-chunk-cache",),
        ("cacheblend", "ask"),
        ("cacheblend", "ask", "Who?"),
        ("cacheblend", "ask", "Who?", "--docs", DEMO, "--no-such-option"),
        ("precompute-chunk-cache", DEMO, "--host-budget", "much"),
        ("cacheblend", "cache", "prune", "--older-than", "yesterday"),
    ],
    ids=["no paths", "no question", "no documents", "unknown option", "size", "duration"],
)
def test_wrong_usage_ends_with_2_and_computes_nothing(cli: Any, args: tuple[str, ...]) -> None:
    result = cli(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage:" in result.stderr


def test_refusals_leave_a_filled_cache_as_it_was(cli: Any, refused: Any, tiny_options: list[str]) -> None:
    assert cli("precompute-chunk-cache", DEMO, *tiny_options).exit_code == 0
    before = {path: path.read_bytes() for path in Path(tiny_options[-1]).rglob("*") if path.is_file()}
    refused("precompute-chunk-cache", DEMO, "none.txt")
    refused("cacheblend", "ask", "why " * 5000, "--docs", DEMO)
    refused("precompute-chunk-cache", DEMO, "--chunk-tokens", "0")
    assert {path: path.read_bytes() for path in Path(tiny_options[-1]).rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["pipelines.cli.precompute", "none.txt"], "none.txt does not exist"),
        (["pipelines.cli.main", "ask", "Who?", "--docs", DEMO, "--selector", "best"], "Selector 'best' is unknown"),
    ],
)
def test_a_process_ends_the_same_way(args: list[str], expected: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *args]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert expected in sentence_of(result)
