"""Documents read from .txt, .md and .jsonl files, and from folders of them.

* ``.txt``: one document, its id the file's name (within a folder: the path below the folder), without a
  title.
* ``.md``: the same, except that a first line ``# Heading`` becomes the title.
* ``.jsonl``: a document a line, ``{"text": ..., "title"?: ..., "id"?: ..., ...}``; further fields become
  metadata. Characters escaped inside a JSON string are kept exactly, NUL (``\\u0000``) included.

All files are UTF-8, with or without a byte order mark. A raw NUL byte means a binary file, which is refused.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from retrieval.documents import Document
from retrieval.errors import RetrievalError

logger = logging.getLogger(__name__)

SUFFIXES = (".txt", ".md", ".jsonl")


def read_documents(path: str | os.PathLike[str]) -> list[Document]:
    """Return the documents of a file, or of the .txt, .md and .jsonl files below a folder, sorted by path.

    Hidden files and files with other suffixes are passed over in a folder.

    Raises:
        RetrievalError: the path is missing, unreadable or of another kind; a file is empty, binary, not
            UTF-8 or holds malformed JSON; a document has no text; one id is used for two different documents.
    """
    root = Path(path)
    if root.is_dir():
        files = _files_below(root)
    elif not root.exists():
        raise RetrievalError(f"{root} does not exist; give a .txt, .md or .jsonl file or a folder of them.")
    elif root.suffix.lower() not in SUFFIXES:
        raise RetrievalError(
            f"{root} is of a kind that is not read here; give a .txt, .md or .jsonl file or a folder of them."
        )
    else:
        files = [root]
    base = root if root.is_dir() else root.parent
    return _with_distinct_ids((document, place) for file in files for document, place in _read_file(file, base))


def _files_below(folder: Path) -> list[Path]:
    below = [path for path in folder.rglob("*") if path.is_file()]
    visible = [path for path in below if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    files = sorted(path for path in visible if path.suffix.lower() in SUFFIXES)
    if not files:
        raise RetrievalError(f"the folder {folder} holds no .txt, .md or .jsonl file; put the documents there.")
    logger.info("reading %d files below %s, passing over %d others", len(files), folder, len(below) - len(files))
    return files


def _read_file(file: Path, base: Path) -> Iterator[tuple[Document, str]]:
    """Yield the documents of ``file``, each with its place for messages."""
    text = _read_text(file)
    if file.suffix.lower() == ".jsonl":
        yield from _parse_jsonl(text, file)
        return
    title, body = _split_heading(text) if file.suffix.lower() == ".md" else ("", text)
    yield Document(file.relative_to(base).as_posix(), body, title), str(file)


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RetrievalError(f"{file} cannot be read ({error.strerror}); check the file.") from error
    if not data.strip():
        raise RetrievalError(f"{file} is empty; fill it or leave it out.")
    if b"\0" in data:
        raise RetrievalError(f"{file} is a binary file, not UTF-8 text; convert it or leave it out.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RetrievalError(f"{file} is not UTF-8 at byte {error.start}; convert it to UTF-8.") from error


def _split_heading(text: str) -> tuple[str, str]:
    """Return title and rest of a Markdown text; a heading with nothing below it stays the text."""
    first, _, rest = text.lstrip().partition("\n")
    if first.startswith("# ") and rest.strip():
        return first[2:].strip(), rest
    return "", text


def _parse_jsonl(text: str, file: Path) -> Iterator[tuple[Document, str]]:
    # Not splitlines(): a JSON string may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{file} line {number}"
            yield _parse_line(line, place), place


def _parse_line(line: str, place: str) -> Document:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise RetrievalError(f"{place} is malformed JSON ({error.msg} at column {error.colno}); correct it.") from error
    except (ValueError, RecursionError) as error:
        raise RetrievalError(f"{place} is JSON that cannot be read ({error}); correct it.") from error
    if not isinstance(fields, dict) or "text" not in fields:
        raise RetrievalError(f'{place} is not an object with a "text"; write {{"text": "..."}} on each line.')
    try:
        return Document.from_any(fields)
    except RetrievalError as error:
        raise RetrievalError(f"{place}: {error}") from error


def _with_distinct_ids(found: Iterator[tuple[Document, str]]) -> list[Document]:
    seen: dict[str, tuple[Document, str]] = {}
    documents = []
    for document, place in found:
        earlier, earlier_place = seen.setdefault(document.id, (document, place))
        if (earlier.text, earlier.title) != (document.text, document.title):
            raise RetrievalError(
                f"{place} uses the id {document.id!r} of another document ({earlier_place}); give each its own id."
            )
        documents.append(document)
    return documents
