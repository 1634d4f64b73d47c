"""`cacheblend ask` and `cacheblend chat`: what is printed where, and what the options do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

QUESTION = "Which baker invented the salt cake?"
DOCUMENTS = ["inputs/data/demo/salt-cake.md", "inputs/data/demo/velmory-ferry.md"]


@pytest.fixture
def options(tiny_options: list[str], tmp_path: Path) -> list[str]:
    return [*tiny_options, "--index-dir", str(tmp_path / "indexes"), "--max-tokens", "6"]


@pytest.fixture
def ask(cli: Any, options: list[str]) -> Any:
    """Asks over the given documents in their order, and returns the JSON that was printed."""

    def run(*args: object, docs: Any = DOCUMENTS, question: str = QUESTION) -> dict[str, Any]:
        result = cli("cacheblend", "ask", question, "--docs", *docs, "--no-retrieval", *options, "--json", *args)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return run


@pytest.fixture
def cached(cli: Any, tiny_options: list[str]) -> None:
    """The documents' chunks are in the cache."""
    assert cli("precompute-chunk-cache", *DOCUMENTS, *tiny_options).exit_code == 0


def write_jsonl(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


def test_retrieved_sources_come_with_scores_and_cached_chunks_are_reused(
    cli: Any, options: list[str], cached: None
) -> None:
    result = cli("cacheblend", "ask", QUESTION, "--docs", *DOCUMENTS, *options)
    assert result.exit_code == 0, result.stderr
    answer, _, sources = result.stdout.partition("Sources")
    assert answer.strip()
    assert re.search(r"0\.\d{3} +inputs/data/demo/salt-cake\.md +Salt cake: ", sources)
    assert sources.index("salt-cake") < sources.index("velmory")
    assert "engine reference | mode blend | selector query(ratio=0.15)+drift | " in sources
    assert re.search(r" \| TTFT [\d,]+ ms \| \d+ prompt tokens", sources)
    assert "prefilled although" not in sources


def test_chunks_that_are_not_cached_are_prefilled_and_the_reason_is_printed(cli: Any, options: list[str]) -> None:
    result = cli("cacheblend", "ask", QUESTION, "--docs", *DOCUMENTS, "--no-retrieval", *options)
    assert "prefilled although reuse was asked for: 2 x missing" in result.stdout
    assert "precompute-chunk-cache" in result.stdout


def test_without_retrieval_all_documents_are_used_in_the_order_given(ask: Any) -> None:
    for docs in (DOCUMENTS, DOCUMENTS[::-1]):
        sources = ask(docs=docs)["sources"]
        assert [(source["document_id"], source["score"]) for source in sources] == [(doc, None) for doc in docs]


def test_the_same_chunk_twice_in_one_prompt_is_reused_twice(ask: Any, cached: None) -> None:
    once, twice = ask(docs=DOCUMENTS[:1]), ask(docs=DOCUMENTS[:1] * 2)
    assert twice["meta"]["reused_tokens"] == 2 * once["meta"]["reused_tokens"] > 0


def test_recomputing_everything_gives_full_prefills_answer(ask: Any, cached: None) -> None:
    full, blend = ask("--policy", "full"), ask("--selector", "full")
    assert full["meta"]["mode"] == "full"
    assert blend["meta"]["recomputed_tokens"] == blend["meta"]["reused_tokens"] > 0
    assert blend["text"] == full["text"]


def test_options_reach_the_engine(ask: Any, cached: None) -> None:
    meta = ask("--selector", "chunk_head", "--head-tokens", 3)["meta"]
    assert meta["recomputed_tokens"] == 3, "of two chunks, the first stands where it was encoded"
    assert ask("--selector", "query", "--fidelity", "faithful")["meta"]["selector"] == "query(ratio=0.3)+drift"
    meta = ask("--selector", "query", "--ratio", 0.5, "--max-tokens", 1)["meta"]
    assert meta["recomputed_ratio"] == pytest.approx(0.5, abs=0.01)
    assert (meta["new_tokens"], meta["finish_reason"]) == (1, "length")


def test_a_seed_makes_sampling_repeatable_and_a_stop_text_cuts_the_answer(ask: Any) -> None:
    hot = ("--temperature", 5, "--max-tokens", 12)
    texts = {seed: ask(*hot, "--seed", seed)["text"] for seed in (1, 2)}
    assert texts[1] != texts[2]
    assert ask(*hot, "--seed", 1)["text"] == texts[1]
    stop = texts[1][len(texts[1]) // 2]
    assert ask(*hot, "--seed", 1, "--stop", stop)["text"] == texts[1].partition(stop)[0].strip()


def test_streaming_prints_the_same_answer(cli: Any, options: list[str]) -> None:
    printed = [
        cli("cacheblend", "ask", QUESTION, "--docs", *DOCUMENTS, "--no-retrieval", *options, flag).stdout
        for flag in ("--stream", "--no-stream")
    ]
    streamed, whole = (text.partition("Sources")[0] for text in printed)
    assert streamed.strip() == whole.strip() != ""


@pytest.mark.parametrize(
    "text",
    ["x", "\N{SLICE OF PIZZA} \N{FAMILY} naïve", "שלום עולם, مرحبا بالعالم", "before\0after \x1b[31mred"],
    ids=["one token", "emoji", "right to left", "control characters"],
)
def test_any_text_can_be_asked_about_and_steers_no_terminal(
    cli: Any, options: list[str], tmp_path: Path, text: str
) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", {"id": "one", "text": text})
    result = cli("cacheblend", "ask", f"What is {text}?", "--docs", file, "--no-retrieval", *options)
    assert result.exit_code == 0, result.stderr
    assert "one " in result.stdout
    assert not set("\0\x1b").intersection(result.stdout)
    answer = json.loads(cli("cacheblend", "ask", "What?", "--docs", file, "--no-retrieval", *options, "--json").stdout)
    assert [source["text"] for source in answer["sources"]] == [text]


def test_arguments_that_are_not_utf_8_are_read_with_replacement_characters(ask: Any) -> None:
    """Python hands such bytes over as lone surrogates."""
    answer = ask("--system-prompt", "Be \udc80 brief.", "--stop", "\udcfe", question="Which \udcff baker?")
    assert answer["question"] == "Which \N{REPLACEMENT CHARACTER} baker?"
    assert answer["meta"]["new_tokens"] > 0


def test_chat_reads_bytes_that_are_not_utf_8_as_replacement_characters_and_goes_on(
    cli: Any, options: list[str]
) -> None:
    args = ("--docs", *DOCUMENTS, "--no-retrieval", *options)
    result = cli("cacheblend", "chat", *args, "--json", stdin=b"Wh\xff\x80?\nSecond?\n")
    assert result.exit_code == 0, result.stderr
    bad = "\N{REPLACEMENT CHARACTER}"
    assert [json.loads(line)["question"] for line in result.stdout.splitlines()] == [f"Wh{bad}{bad}?", "Second?"]


def test_every_chunk_identical_is_found_once_and_reused(cli: Any, ask: Any, options: list[str], tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", *({"id": str(n), "text": "All the same."} for n in range(4)))
    assert cli("precompute-chunk-cache", file, *options[:4]).exit_code == 0
    assert len(ask(docs=[file])["sources"]) == 4
    assert ask(docs=[file])["meta"]["fallback_reason"] is None
    result = cli("cacheblend", "ask", QUESTION, "--docs", file, *options, "--json")
    assert len(json.loads(result.stdout)["sources"]) == 1


def test_the_environment_chooses_the_engine_and_an_option_overrides_it(
    cli: Any, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE", "steam")
    args = ("cacheblend", "ask", QUESTION, "--docs", *DOCUMENTS, "--no-retrieval", *options)
    refused = cli(*args)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "'steam'" in refused.stderr
    assert cli(*args, "--engine", "reference").exit_code == 0


def test_chat_answers_line_by_line_until_quit_and_survives_a_bad_question(cli: Any, options: list[str]) -> None:
    lines = ["First?", "", "   ", "long " * 5000, "Second?", ":quit", "Third?"]
    args = ("--docs", *DOCUMENTS, "--no-retrieval", *options)
    result = cli("cacheblend", "chat", *args, "--json", stdin="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    assert [json.loads(line)["question"] for line in result.stdout.splitlines()] == ["First?", "Second?"]
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "do not fit the model's context of 4096" in error


def test_chat_ends_with_its_input_and_prints_each_answer_with_its_sources(cli: Any, options: list[str]) -> None:
    result = cli("cacheblend", "chat", "--docs", *DOCUMENTS, "--no-retrieval", *options, stdin="First?\nSecond?")
    assert result.exit_code == 0
    assert result.stdout.count("Sources") == result.stdout.count("| TTFT ") == 2
