"""`cacheblend demo`, and the examples that each `--help` shows."""

from __future__ import annotations

import glob
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cacheblend.selectors import SELECTOR_NAMES

COMMANDS = [
    ("precompute-chunk-cache",),
    ("cacheblend", "ask"),
    ("cacheblend", "chat"),
    ("cacheblend", "demo"),
    ("cacheblend", "cache", "ls"),
    ("cacheblend", "cache", "verify"),
    ("cacheblend", "cache", "prune"),
]


@pytest.fixture
def options(tiny_options: list[str], tmp_path: Path) -> list[str]:
    return [*tiny_options, "--index-dir", str(tmp_path / "indexes")]


def test_a_second_demo_finds_every_chunk_cached(cli: Any, options: list[str]) -> None:
    first, second = (cli("cacheblend", "demo", *options) for _ in range(2))
    assert first.exit_code == second.exit_code == 0, first.stderr + second.stderr
    assert "6 of 6 chunks prefilled" in first.stdout
    assert "All 6 chunks were cached" in second.stdout
    assert f"engine reference, model {options[1]}"[:60] in second.stdout
    for arm in ("full prefill", "reuse", "blend"):
        assert re.search(rf"│ {re.escape(arm)} +│ +[\d,]+ ms │", second.stdout), arm


def test_the_demo_answers_its_questions_with_the_bundled_model_and_says_what_blending_saved(
    cli: Any, tmp_path: Path
) -> None:
    result = cli("cacheblend", "demo", "--cache-dir", tmp_path / "kv", "--index-dir", tmp_path / "ix", "--json")
    assert result.exit_code == 0, result.stderr
    account = json.loads(result.stdout)
    assert (account["engine"], account["dtype"]) == ("reference", "float32")
    full, reuse, blend = account["arms"]
    for arm in account["arms"]:
        for answer, document in zip(arm["answers"], ("harrowmere", "salt-cake", "velmory"), strict=True):
            assert answer["sources"][0]["document_id"].startswith(document)
            assert answer["meta"]["fallback_reason"] is None
    for answer, expected in zip(blend["answers"], ("yellow", "Marta Quillen", "Signe Barlow"), strict=True):
        assert expected in answer["text"]
    assert full["same_answer_as_full"] == [True] * 3
    assert full["reused_tokens"] == reuse["recomputed_tokens"] == 0
    assert 0 < blend["recomputed_tokens"] < blend["reused_tokens"] == reuse["reused_tokens"]


def example_of(help_text: str) -> str:
    lines = help_text.partition("Example:\n")[2].splitlines()
    return lines[0].strip()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_example_of_each_help_works_when_pasted(cli: Any, options: list[str], command: tuple[str, ...]) -> None:
    shown = cli(*command, "--help")
    assert shown.exit_code == 0
    line, _, stdin_from = example_of(shown.stdout).partition(" < ")
    words = shlex.split(line)
    assert tuple(words[: len(command)]) == command
    args = [path for word in words[len(command) :] for path in (sorted(glob.glob(word)) or [word])]
    if command[:2] == ("cacheblend", "cache"):
        assert cli("precompute-chunk-cache", "inputs/data/demo", *options[:4]).exit_code == 0
    taken = [word for word in ("--model", "--cache-dir", "--index-dir") if f"{word} " in shown.stdout]
    extra = [
        part for name, value in zip(options[::2], options[1::2], strict=True) if name in taken for part in (name, value)
    ]
    stdin = Path(stdin_from).read_text(encoding="utf-8") if stdin_from else ""
    result = cli(*command, *args, *extra, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()


def test_help_names_every_selector_and_every_command(cli: Any) -> None:
    text = " ".join(cli("cacheblend", "ask", "--help").stdout.split())
    assert all(name in text for name in SELECTOR_NAMES)
    assert all(name in cli("cacheblend", "--help").stdout for name in ("ask", "chat", "demo", "cache"))
