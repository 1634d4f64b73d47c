"""`--primer` and `--save-primer`: choosing, pinning and refusing a primer on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

COMMAND = "precompute-chunk-cache"
CHUNKS = ["--chunk-tokens", "128"]
AUTO = ["--primer", "auto"]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder of documents that are enough for a primer."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for n in range(24):
        text = f"Lighthouse {n} stands on rock {n * 7} and was lit in {1800 + n}. Its keeper counts ships at night."
        (folder / f"{n:02}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def precompute(cli: Any, tiny_options: list[str]) -> Any:
    """Runs the command with --json and returns its account."""

    def run(*args: object) -> dict[str, Any]:
        result = cli(COMMAND, *args, *CHUNKS, *tiny_options, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return run


def add_documents(folder: Path) -> int:
    for n in range(24, 40):
        (folder / f"{n:02}.txt").write_text(f"Ferry {n} sank off rock {n * 7} in {1900 + n}.", encoding="utf-8")
    return 40 - 24


def test_a_saved_primer_keeps_the_chunks_of_a_folder_that_grows(
    precompute: Any, documents: Path, tmp_path: Path
) -> None:
    file = tmp_path / "primer.jsonl"
    first = precompute(documents, *AUTO, "--save-primer", file)
    assert (first["computed"], bool(first["primer"])) == (24, True)
    added = add_documents(documents)
    again = precompute(documents, "--primer", file)
    assert (again["cached"], again["computed"]) == (24, added)
    assert again["primer"] == first["primer"]


def test_without_a_pin_a_folder_that_grows_may_get_another_primer(precompute: Any, documents: Path) -> None:
    """What the help says: these documents do, and their chunks are computed anew."""
    first = precompute(documents, *AUTO)
    add_documents(documents)
    again = precompute(documents, *AUTO)
    assert again["primer"] != first["primer"]
    assert again["computed"] > 16


def test_asking_over_the_same_documents_finds_every_chunk(
    precompute: Any, cli: Any, tiny_options: list[str], documents: Path, tmp_path: Path
) -> None:
    file = tmp_path / "primer.jsonl"
    precompute(documents, *AUTO, "--save-primer", file)
    question = ["ask", "Which?", "--no-retrieval", "--max-tokens", 2, *CHUNKS, *tiny_options]
    assert "prefilled although" not in cli("cacheblend", *question, *AUTO, "--docs", documents).stdout
    some = documents / "03.txt"
    pinned = cli("cacheblend", *question, "--primer", file, "--docs", some)
    assert pinned.exit_code == 0, pinned.stderr
    assert "prefilled although" not in pinned.stdout


def test_asking_with_another_primer_says_why_chunks_were_missed(
    precompute: Any, cli: Any, tiny_options: list[str], documents: Path, tmp_path: Path
) -> None:
    file = tmp_path / "primer.jsonl"
    precompute(documents, *AUTO, "--save-primer", file)
    own = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    in_primer = next(path for path in sorted(documents.iterdir()) if path.read_text(encoding="utf-8") in own)
    other = next(path for path in sorted(documents.iterdir()) if path.read_text(encoding="utf-8") not in own)
    question = ["ask", "Which?", "--no-retrieval", "--max-tokens", 2, *CHUNKS, *tiny_options, "--docs"]
    missed = cli("cacheblend", *question, other).stdout
    assert "1 x prefix_changed" in missed
    assert "ask with the prefix, primer and system prompt of precomputing" in missed
    # Stored behind the head, where every primer finds it.
    assert "prefilled although" not in cli("cacheblend", *question, in_primer).stdout


def test_by_default_and_with_none_chunks_are_computed_behind_the_prefix_alone(
    precompute: Any, cli: Any, documents: Path
) -> None:
    account = precompute(documents)
    assert (account["primer"], account["computed"]) == ([], 24)
    assert precompute(documents, "--primer", "none")["cached"] == 24
    assert precompute(documents, *AUTO, "--dry-run")["computed"] > 16
    shown = re.search(r"--primer \[auto\|none\|FILE\].*?\[default:\s+(\w+)\]", cli(COMMAND, "--help").stdout, re.DOTALL)
    assert shown is not None
    assert shown[1] == "none"


def test_the_primer_is_in_the_summary(cli: Any, tiny_options: list[str], documents: Path) -> None:
    result = cli(COMMAND, documents, *AUTO, *CHUNKS, *tiny_options, "--dry-run")
    assert re.search(r"primer\W+\d+ tokens", result.stdout)
    few = cli(COMMAND, documents / "01.txt", *AUTO, *CHUNKS, *tiny_options, "--dry-run")
    assert re.search(r"primer\W+none", few.stdout)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--primer", "nowhere.txt"], "The primer nowhere.txt is not a file"),
        (["--primer", ""], "The primer . is not a file"),
        (["--save-primer", "primer.txt"], "cannot be saved as primer.txt; give a name that ends in .jsonl"),
        (["--save-primer", "primer.jsonl"], "There is no primer to save as primer.jsonl; use `auto`, and more"),
        (["--save-primer", "primer.jsonl", "--primer", "none"], "There is no primer to save as primer.jsonl"),
        ([*AUTO, "--save-primer", "/proc/primer.jsonl"], "/proc/primer.jsonl cannot be used"),
    ],
)
def test_a_primer_that_cannot_be_used_or_kept_is_named_and_nothing_is_computed(
    cli: Any, tiny_options: list[str], documents: Path, tmp_path: Path, options: list[str], sentence: str
) -> None:
    result = cli(COMMAND, documents, *CHUNKS, *tiny_options, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert sentence in error
    assert not list((tmp_path / "kv").rglob("*.safetensors"))
