"""From a file to JSON records, each with the place it came from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from inputs.errors import DatasetError


class Record(NamedTuple):
    """One JSON value of a file: `place` names it in messages, `position` counts the file's records from 1."""

    place: str
    position: int
    value: Any


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of `path`: the items of a JSON array, or one JSON value a line (blank ones skipped).

    Raises DatasetError if the file is missing, a folder, unreadable, empty, not UTF-8 text, or not JSON.
    """
    text = _read_text(path)
    if text.lstrip().startswith("["):
        yield from _array_items(path, text)
    else:
        yield from _lines(path, text)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DatasetError(f"{path}: there is no such file; check the path.") from None
    except IsADirectoryError:
        raise DatasetError(f"{path}: this is a folder; name the data set file inside it.") from None
    except OSError as error:
        raise DatasetError(f"{path}: the file cannot be read ({error.strerror}).") from error
    if b"\0" in raw:
        raise DatasetError(
            f"{path}: this is a binary file (NUL at byte {raw.index(0)}); JSON saved as UTF-8 is expected."
        )
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DatasetError(f"{path}, line {line}: the text is not UTF-8; save the file as UTF-8.") from None
    if not text.strip():
        raise DatasetError(f"{path}: the file is empty; it must hold at least one question.")
    return text


def _array_items(path: Path, text: str) -> Iterator[Record]:
    items = _parse(path, text, first_line=1)
    if not items:
        raise DatasetError(f"{path}: the JSON array is empty; it must hold at least one question.")
    for position, item in enumerate(items, start=1):
        yield Record(f"{path}, item {position}", position, item)


def _lines(path: Path, text: str) -> Iterator[Record]:
    position = 0
    # Not splitlines(): it would also cut at U+2028 and its like, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            position += 1
            yield Record(f"{path}, line {number}", position, _parse(path, line, first_line=number))


def _parse(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DatasetError(
            f"{path}, line {line}, column {error.colno}: malformed JSON ({error.msg}); expected is a "
            "JSON array or one JSON object a line."
        ) from None
    except (RecursionError, ValueError) as error:
        # Nesting or a number beyond what Python accepts.
        raise DatasetError(f"{path}, line {first_line}: this JSON cannot be read ({error}).") from None
