"""Paths on the command line to documents."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from inputs import distinct_contexts, load_examples
from pipelines.errors import PipelineError
from retrieval.documents import Document
from retrieval.readers import SUFFIXES, read_documents

logger = logging.getLogger(__name__)

_QUESTION_SUFFIXES = (".json", ".jsonl")


def load_documents(paths: Iterable[Path]) -> list[Document]:
    """Read the documents of files and of folders of them, in the order given.

    A file is `.txt`, `.md`, `.jsonl` with a document a line, or a `.json` or `.jsonl` of questions in MuSiQue's or
    CacheBlend's shape, which gives their distinct contexts. A text file's document is named by its path.

    Raises:
        PipelineError, RetrievalError, DatasetError: one sentence that names the file, the place in it and the remedy.
    """
    return [document for path in paths for file in _files(path) for document in _read(file)]


def _files(path: Path) -> Iterator[Path]:
    """The file itself, or the files below a folder, sorted; hidden ones and other kinds are passed over."""
    if not path.is_dir():
        yield path
        return
    visible = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    files = [file for file in visible if _is_readable_kind(file)]
    if not files:
        raise PipelineError(f"The folder {path} holds no .txt, .md or .jsonl file; put the documents there.")
    logger.info("reading %d files below %s, passing over %d others", len(files), path, len(visible) - len(files))
    yield from files


def _is_readable_kind(file: Path) -> bool:
    # Beside documents, a .json file may be anything; only one that holds questions is meant.
    suffix = file.suffix.lower()
    return suffix in SUFFIXES or (suffix in _QUESTION_SUFFIXES and _holds_questions(file))


def _read(file: Path) -> list[Document]:
    suffix = file.suffix.lower()
    if suffix == ".json" or (suffix == ".jsonl" and _holds_questions(file)):
        return [Document("", context.text, context.title) for context in distinct_contexts(load_examples(file))]
    documents = read_documents(file)
    if suffix == ".jsonl":
        return documents
    return [replace(document, id=file.as_posix()) for document in documents]


def _holds_questions(file: Path) -> bool:
    """Whether the file's first record has the keys of MuSiQue's or CacheBlend's questions."""
    try:
        value, _ = json.JSONDecoder().raw_decode(file.read_text(encoding="utf-8-sig").lstrip())
    except (OSError, ValueError, RecursionError):
        return False
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and not first.keys().isdisjoint(("paragraphs", "ctxs"))
