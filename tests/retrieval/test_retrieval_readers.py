"""Reading documents: bad input is one clear sentence that names the file."""

import json
from pathlib import Path

import pytest

from retrieval.documents import Document
from retrieval.errors import RetrievalError
from retrieval.readers import read_documents


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_a_text_file_is_one_document_named_by_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tower.txt", "\ufeffA tower.\r\nTwo lines.\n")
    assert read_documents(path) == [Document("tower.txt", "A tower.\r\nTwo lines.\n")]


def test_the_first_heading_of_markdown_is_the_title(tmp_path: Path) -> None:
    path = write(tmp_path / "tower.md", "\n# The tower\n\nIt stands.\n")
    assert read_documents(path) == [Document("tower.md", "\nIt stands.\n", "The tower")]
    write(path, "# Only a heading\n")
    assert read_documents(path) == [Document("tower.md", "# Only a heading\n")]


def test_each_line_of_jsonl_is_a_document_with_its_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"text": "One", "title": "t", "id": "a", "url": "u"}\n\n{"text": "Two"}\n')
    assert read_documents(path) == [Document("a", "One", "t", {"url": "u"}), Document("", "Two")]


def test_text_inside_jsonl_is_kept_exactly_with_emoji_right_to_left_script_and_nul(tmp_path: Path) -> None:
    text = "👨‍👩‍👧 שלום \0 nul \u2028 separator"
    lines = [json.dumps({"text": text}), json.dumps({"text": text, "id": "raw"}, ensure_ascii=False)]
    documents = read_documents(write(tmp_path / "d.jsonl", "\n".join(lines)))
    assert [document.text for document in documents] == [text, text]


def test_a_folder_gives_the_documents_of_all_its_files_in_order_of_their_paths(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "B")
    write(tmp_path / "a" / "c.md", "C")
    write(tmp_path / "d.jsonl", '{"text": "D", "id": "d"}')
    write(tmp_path / ".hidden" / "e.txt", "E")
    write(tmp_path / "f.pdf", b"%PDF\0")
    assert [document.id for document in read_documents(tmp_path)] == ["a/c.md", "b.txt", "d"]


BAD_FILES = {
    "empty": ("d.txt", b"", r"d\.txt is empty"),
    "blank": ("d.md", b" \n\n", r"d\.md is empty"),
    "binary": ("d.txt", b"GIF89a\0\x01", r"d\.txt is a binary file"),
    "utf16": ("d.txt", "text".encode("utf-16"), r"d\.txt is a binary file"),
    "latin1": ("d.txt", "café".encode("latin-1"), r"d\.txt is not UTF-8 at byte 3"),
    "malformed": ("d.jsonl", b'{"text": "ok"}\n{"text": \n', r"d\.jsonl line 2 is malformed JSON \(.*column"),
    "nested": ("d.jsonl", b"[" * 200_000, r"d\.jsonl line 1 is JSON that cannot be read"),
    "not_object": (
        "d.jsonl",
        b'{"text": "ok"}\n\n["text"]',
        r"d\.jsonl line 3 is not an object with a \"text\"",
    ),
    "textless": ("d.jsonl", b'{"id": "x"}', r"d\.jsonl line 1 is not an object with a \"text\""),
    "no_text": ("d.jsonl", b'{"id": "x", "text": " "}', r"d\.jsonl line 1: document 'x' has no text"),
    "wrong_type": (
        "d.jsonl",
        b'{"id": "x", "text": 3}',
        r"d\.jsonl line 1: document 'x' has a text of type int",
    ),
    "suffix": ("d.pdf", b"text", r"d\.pdf is of a kind that is not read here"),
    "same_id": (
        "d.jsonl",
        b'{"id": "x", "text": "a"}\n{"id": "x", "text": "b"}',
        r"line 2 uses the id 'x' of another document \(.*line 1\)",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("within_folder", [False, True])
def test_a_bad_file_is_refused_in_one_sentence_that_names_it(tmp_path: Path, case: str, within_folder: bool) -> None:
    name, data, message = BAD_FILES[case]
    path = write(tmp_path / name, data)
    if case == "suffix" and within_folder:
        message = r"holds no \.txt, \.md or \.jsonl file"
    with pytest.raises(RetrievalError, match=message) as caught:
        read_documents(tmp_path if within_folder else path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"nowhere\.txt does not exist"):
        read_documents(tmp_path / "nowhere.txt")
    with pytest.raises(RetrievalError, match=r"holds no \.txt, \.md or \.jsonl file"):
        read_documents(tmp_path)
