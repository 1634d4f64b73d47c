"""The loaders on real small files of every shape they take."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value

from inputs import (
    INVENTED_PATH,
    Context,
    Example,
    distinct_contexts,
    load_dataset,
    load_examples,
    load_invented,
    load_invented_dataset,
)

FEATURES = Features(
    {
        "id": Value("string"),
        "question": Value("string"),
        "answers": List(Value("string")),
        "contexts": List(
            {"title": Value("string"), "text": Value("string"), "supporting": Value("bool")},
        ),
    }
)


def musique(id: str = "2hop__1_2", **changes: Any) -> dict[str, Any]:
    """One question as MuSiQue publishes it."""
    row = {
        "id": id,
        "paragraphs": [
            {"idx": 0, "title": "Mill", "paragraph_text": "The mill grinds.", "is_supporting": True},
            {"idx": 1, "title": "Quay", "paragraph_text": "The quay floats.", "is_supporting": False},
        ],
        "question": "What does the mill do?",
        "question_decomposition": [{"id": 1, "question": "What?", "answer": "grinds", "paragraph_support_idx": 0}],
        "answer": "grinds",
        "answer_aliases": ["it grinds"],
        "answerable": True,
    }
    return row | changes


def cacheblend(**changes: Any) -> dict[str, Any]:
    """One question as CacheBlend's own files have it."""
    row = {
        "ctxs": [{"title": "", "text": "The mill grinds."}, {"title": "Quay", "text": "The quay floats."}],
        "question": "What does the mill do?",
        "answers": ["grinds", "it grinds"],
    }
    return row | changes


def write_lines(path: Path, *rows: dict[str, Any], ascii_only: bool = False) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=ascii_only) + "\n" for r in rows), encoding="utf-8")
    return path


def write_array(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=4), encoding="utf-8")
    return path


def test_official_musique_lines_become_examples(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "dev.jsonl", musique("a"), musique("b", answer_aliases=[]))
    contexts = (Context("Mill", "The mill grinds.", True), Context("Quay", "The quay floats.", False))
    assert load_examples(path) == [
        Example("a", "What does the mill do?", ("grinds", "it grinds"), contexts),
        Example("b", "What does the mill do?", ("grinds",), contexts),
    ]


def test_a_cacheblend_array_becomes_examples_with_ids_of_file_name_and_place(tmp_path: Path) -> None:
    path = write_array(tmp_path / "musique_s.json", cacheblend(), cacheblend(answers=["yes"]))
    contexts = (Context("", "The mill grinds.", None), Context("Quay", "The quay floats.", None))
    assert load_examples(path) == [
        Example("musique_s-1", "What does the mill do?", ("grinds", "it grinds"), contexts),
        Example("musique_s-2", "What does the mill do?", ("yes",), contexts),
    ]


def test_a_path_given_as_text_loads_the_same(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "dev.jsonl", musique())
    assert load_examples(str(path)) == load_examples(path)


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "plain.jsonl", musique("a"), musique("b"))
    dressed = tmp_path / "dressed.jsonl"
    lines = plain.read_bytes().splitlines()
    dressed.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines) + b"\r\n")
    assert load_examples(dressed) == load_examples(plain)


def test_unanswerable_questions_are_left_out_and_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "full.jsonl", musique("a", answerable=False), musique("b"))
    with caplog.at_level(logging.INFO, logger="inputs"):
        assert [example.id for example in load_examples(path)] == ["b"]
    assert "left out 1 unanswerable questions, kept 1" in caplog.text


def test_blank_and_repeated_aliases_are_dropped_and_the_answer_stays_first(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "dev.jsonl", musique(answer_aliases=["", "it grinds", "grinds", "it grinds"]))
    assert load_examples(path)[0].answers == ("grinds", "it grinds")


@pytest.mark.parametrize("ascii_only", [False, True], ids=["plain", "escaped"])
@pytest.mark.parametrize(
    "text",
    [
        "🐦‍⬛ 🏳️‍🌈 👩🏽‍🚀 flew",
        "המגדלור של הארומיר צהוב",
        "المنارة \u202bصفراء\u202c",
        "one\u2028two\u2029three\x85four",
        "  spaces kept \t",
        "nul \x00 inside",
    ],
    ids=["emoji", "hebrew", "arabic", "line-separators", "spaces", "escaped-nul"],
)
def test_text_of_every_script_comes_back_unchanged(tmp_path: Path, text: str, ascii_only: bool) -> None:
    paragraph = {"idx": 0, "title": text, "paragraph_text": text, "is_supporting": True}
    row = musique(id="x", question=text, answer=text, answer_aliases=[], paragraphs=[paragraph])
    path = write_lines(tmp_path / "dev.jsonl", row, ascii_only=ascii_only)
    expected = Example("x", text, (text,), (Context(text, text, True),))
    assert load_examples(path) == [expected]
    table = load_dataset(path)[0]
    assert (table["question"], table["answers"], table["contexts"][0]["text"]) == (text, [text], text)


@pytest.mark.parametrize("shape", ["musique", "cacheblend"])
def test_a_dataset_holds_what_the_examples_hold_under_declared_features(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "questions"
    if shape == "musique":
        write_lines(path, musique("a"), musique("b"))
    else:
        write_array(path, cacheblend(), cacheblend())
    dataset = load_dataset(path)
    assert isinstance(dataset, Dataset)
    assert dataset.features == FEATURES
    assert [
        Example(
            row["id"],
            row["question"],
            tuple(row["answers"]),
            tuple(Context(**context) for context in row["contexts"]),
        )
        for row in dataset
    ] == load_examples(path)


def test_our_own_data_set_loads_as_a_dataset_of_the_same_questions() -> None:
    dataset = load_invented_dataset()
    assert dataset.features == FEATURES
    assert dataset["question"][:] == [example.question for example in load_invented()]


def test_distinct_contexts_come_once_each_in_the_order_first_met() -> None:
    one, two = Context("One", "text", True), Context("Two", "text", False)
    retitled, reused = Context("One", "other", None), Context("One", "text", False)
    examples = [
        Example("a", "?", ("x",), (two, one)),
        Example("b", "?", ("x",), (reused, retitled, two)),
    ]
    assert distinct_contexts(examples) == [
        Context("Two", "text"),
        Context("One", "text"),
        Context("One", "other"),
    ]


def test_our_own_data_set_has_as_many_distinct_contexts_as_titles() -> None:
    contexts = distinct_contexts(load_invented())
    assert len(contexts) == len({context.title for context in contexts}) >= 88


def test_loading_examples_imports_neither_datasets_nor_torch() -> None:
    code = (
        "import sys; from inputs import load_examples; "
        f"load_examples({str(INVENTED_PATH)!r}); "
        "print([name for name in ('datasets', 'torch', 'pandas') if name in sys.modules])"
    )
    root = INVENTED_PATH.parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
