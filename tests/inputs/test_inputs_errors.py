"""Bad input: one sentence each, naming the file, the line where there is one, and what was expected."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inputs import DatasetError, load_dataset, load_examples

PARAGRAPH = {"idx": 0, "title": "Mill", "paragraph_text": "The mill grinds.", "is_supporting": True}
MUSIQUE = {"id": "a", "paragraphs": [PARAGRAPH], "question": "What?", "answer": "x", "answer_aliases": []}
CTX = {"title": "", "text": "The mill grinds."}
CACHEBLEND = {"ctxs": [CTX], "question": "What?", "answers": ["x"]}


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def message(path: Path, load: Callable[[Path], object] = load_examples) -> str:
    """The error that loading gives, checked to be one line that starts with the path."""
    with pytest.raises(DatasetError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}")
    assert "\n" not in text
    assert text.endswith(".")
    return text.removeprefix(f"{path}")


def test_a_dataset_error_is_a_value_error() -> None:
    assert issubclass(DatasetError, ValueError)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert message(tmp_path / "none.jsonl") == ": there is no such file; check the path."


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    assert message(tmp_path) == ": this is a folder; name the data set file inside it."


def test_a_path_through_a_file_is_reported_with_the_systems_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert message(tmp_path / "file" / "below") == f": the file cannot be read ({os.strerror(errno.ENOTDIR)})."


@pytest.mark.parametrize("content", ["", " \n\n\t", "\ufeff"], ids=["no-bytes", "blank", "only-a-mark"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content, encoding="utf-8")
    assert message(path) == ": the file is empty; it must hold at least one question."


def test_an_empty_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text("[]")
    assert message(path) == ": the JSON array is empty; it must hold at least one question."


def test_a_binary_file_is_refused_at_its_first_nul(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"PK\x03\x04\0\0")
    assert message(path) == ": this is a binary file (NUL at byte 4); JSON saved as UTF-8 is expected."


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "latin1.jsonl"
    path.write_bytes(json.dumps(MUSIQUE).encode() + b'\n{"question": "Caf\xe9?"}\n')
    assert message(path) == ", line 2: the text is not UTF-8; save the file as UTF-8."


def test_malformed_json_lines_are_reported_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps(MUSIQUE) + '\n\n{"id": "b", oops}\n')
    assert message(path).startswith(", line 3, column 13: malformed JSON (")


def test_a_malformed_json_array_is_reported_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text('[\n  {"question": "What?",\n   "answers" ["x"]}\n]\n')
    assert message(path).startswith(", line 3, column 14: malformed JSON (")


def test_a_file_that_was_cut_short_is_malformed_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(json.dumps([CACHEBLEND], indent=1)[:-20])
    assert "malformed JSON" in message(path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}"], ids=["nesting", "number"])
def test_json_beyond_what_can_be_read_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "deep.json"
    path.write_text(content)
    assert message(path).startswith(", line 1: this JSON cannot be read (")


def test_an_unknown_shape_says_which_keys_were_found_and_which_are_expected(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "hello", "completion": "you"}\n')
    assert message(path) == (
        ", line 1: unknown shape, keys found: 'prompt', 'completion'; expected are MuSiQue's 'paragraphs', "
        "'question', 'answer' or CacheBlend's 'ctxs', 'question', 'answers'."
    )


@pytest.mark.parametrize(
    ("value", "found"),
    [("17", "a number"), ('"text"', "a text"), ("null", "null"), ("true", "true or false")],
)
def test_a_record_that_is_no_object_is_refused(tmp_path: Path, value: str, found: str) -> None:
    path = tmp_path / "values.jsonl"
    path.write_text(value)
    assert message(path).startswith(f", line 1: found {found} instead of an object with MuSiQue's")


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text(f"{json.dumps(MUSIQUE)}\n{json.dumps(MUSIQUE)}\n")
    assert message(path) == f", line 2: the id 'a' is taken by {path}, line 1; ids must be unique."


def test_a_file_of_unanswerable_questions_only_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps(MUSIQUE | {"answerable": False}))
    assert message(path) == ": every question is marked unanswerable; give a file with answerable ones."


BLANK = "it must be a text that is not empty."
BAD_MUSIQUE = {
    "no-question": (without(MUSIQUE, "question"), f": 'question' is missing; {BLANK}"),
    "blank-question": (MUSIQUE | {"question": " \n"}, f": 'question' is blank; {BLANK}"),
    "question-of-another-kind": (MUSIQUE | {"question": ["a"]}, f": 'question' is a list; {BLANK}"),
    "no-answer": (without(MUSIQUE, "answer"), f": 'answer' is missing; {BLANK}"),
    "blank-answer": (MUSIQUE | {"answer": ""}, f": 'answer' is blank; {BLANK}"),
    "aliases-no-list": (
        MUSIQUE | {"answer_aliases": "x"},
        ": 'answer_aliases' is a text; it must be a list of texts.",
    ),
    "alias-no-text": (
        MUSIQUE | {"answer_aliases": [1998]},
        ": 'answer_aliases' holds a number; it must be a list of texts.",
    ),
    "id-no-text": (MUSIQUE | {"id": 7}, f": 'id' is a number; {BLANK}"),
    "no-contexts": (
        MUSIQUE | {"paragraphs": []},
        ": there are no contexts; 'paragraphs' must be a list of at least one object.",
    ),
    "contexts-no-list": (
        MUSIQUE | {"paragraphs": {"0": PARAGRAPH}},
        ": there are no contexts; 'paragraphs' must be a list of at least one object.",
    ),
    "context-no-object": (
        MUSIQUE | {"paragraphs": [PARAGRAPH, "text"]},
        ", context 2: found a text; it must be an object.",
    ),
    "context-without-text": (
        MUSIQUE | {"paragraphs": [PARAGRAPH, without(PARAGRAPH, "paragraph_text")]},
        f", context 2: 'paragraph_text' is missing; {BLANK}",
    ),
    "context-with-blank-text": (
        MUSIQUE | {"paragraphs": [PARAGRAPH | {"paragraph_text": " "}]},
        f", context 1: 'paragraph_text' is blank; {BLANK}",
    ),
    "title-no-text": (
        MUSIQUE | {"paragraphs": [PARAGRAPH | {"title": 3}]},
        ", context 1: 'title' is a number; it must be a text.",
    ),
    "supporting-no-flag": (
        MUSIQUE | {"paragraphs": [PARAGRAPH | {"is_supporting": "yes"}]},
        ", context 1: 'is_supporting' is a text; it must be true or false.",
    ),
    "half-a-surrogate": (
        MUSIQUE | {"question": "ab\ud83d"},
        ": 'question' holds half a surrogate pair at character 3; write it whole.",
    ),
}
BAD_CACHEBLEND = {
    "no-question": (without(CACHEBLEND, "question"), f": 'question' is missing; {BLANK}"),
    "blank-question": (CACHEBLEND | {"question": ""}, f": 'question' is blank; {BLANK}"),
    "no-answers": (
        without(CACHEBLEND, "answers"),
        ": 'answers' is missing; it must be a list of texts.",
    ),
    "empty-answers": (
        CACHEBLEND | {"answers": []},
        ": 'answers' holds no text; give at least one answer.",
    ),
    "blank-answers": (
        CACHEBLEND | {"answers": ["", " "]},
        ": 'answers' holds no text; give at least one answer.",
    ),
    "answer-no-text": (
        CACHEBLEND | {"answers": [None]},
        ": 'answers' holds null; it must be a list of texts.",
    ),
    "no-contexts": (
        CACHEBLEND | {"ctxs": []},
        ": there are no contexts; 'ctxs' must be a list of at least one object.",
    ),
    "context-without-text": (
        CACHEBLEND | {"ctxs": [CTX, CTX, {"title": "x"}]},
        f", context 3: 'text' is missing; {BLANK}",
    ),
}


@pytest.mark.parametrize("case", BAD_MUSIQUE)
def test_a_bad_musique_line_is_refused_with_its_line_and_the_remedy(tmp_path: Path, case: str) -> None:
    row, expected = BAD_MUSIQUE[case]
    path = tmp_path / "dev.jsonl"
    path.write_text(f"{json.dumps(MUSIQUE | {'id': 'first'})}\n{json.dumps(row)}\n")
    assert message(path) == f", line 2{expected}"


@pytest.mark.parametrize("case", BAD_CACHEBLEND)
def test_a_bad_cacheblend_item_is_refused_with_its_number_and_the_remedy(tmp_path: Path, case: str) -> None:
    row, expected = BAD_CACHEBLEND[case]
    path = tmp_path / "set.json"
    path.write_text(json.dumps([CACHEBLEND, row], indent=2))
    assert message(path) == f", item 2{expected}"


def test_loading_a_dataset_reports_bad_input_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps([CACHEBLEND | {"question": ""}]))
    assert message(path, load_dataset) == message(path)
