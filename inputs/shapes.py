"""The two shapes of question records we read, MuSiQue's and CacheBlend's, told apart by their keys."""

from collections.abc import Callable
from typing import Any

from inputs.errors import DatasetError
from inputs.examples import Context, Example
from inputs.reading import Record

_EXPECTED = "MuSiQue's 'paragraphs', 'question', 'answer' or CacheBlend's 'ctxs', 'question', 'answers'"


def is_unanswerable(record: Record) -> bool:
    """Tell whether MuSiQue marks the question as one that its paragraphs do not answer."""
    return isinstance(record.value, dict) and record.value.get("answerable") is False


def parse_record(record: Record, fallback_id: str) -> Example:
    """Turn one record of either shape into an Example; a record without an id of its own gets `fallback_id`.

    Raises DatasetError if the shape is unknown, or the question, the answers or a context's text is missing.
    """
    place, _, value = record
    if not isinstance(value, dict):
        raise DatasetError(f"{place}: found {_kind(value)} instead of an object with {_EXPECTED}.")
    if "paragraphs" in value:
        return _from_musique(place, value, fallback_id)
    if "ctxs" in value:
        return _from_cacheblend(place, value, fallback_id)
    found = ", ".join(repr(key) for key in value) or "none"
    raise DatasetError(f"{place}: unknown shape, keys found: {found}; expected are {_EXPECTED}.")


def _from_musique(place: str, value: dict[str, Any], fallback_id: str) -> Example:
    answer = _text(place, "answer", value.get("answer"))
    aliases = _answers(place, "answer_aliases", value.get("answer_aliases") or [])
    return Example(
        id=_text(place, "id", value.get("id", fallback_id)),
        question=_text(place, "question", value.get("question")),
        answers=tuple(dict.fromkeys((answer, *aliases))),
        contexts=_contexts(place, "paragraphs", value["paragraphs"], _paragraph),
    )


def _from_cacheblend(place: str, value: dict[str, Any], fallback_id: str) -> Example:
    answers = _answers(place, "answers", value.get("answers"))
    if not answers:
        raise DatasetError(f"{place}: 'answers' holds no text; give at least one answer.")
    return Example(
        id=fallback_id,
        question=_text(place, "question", value.get("question")),
        answers=answers,
        contexts=_contexts(place, "ctxs", value["ctxs"], _ctx),
    )


def _paragraph(place: str, value: dict[str, Any]) -> Context:
    supporting = value.get("is_supporting")
    if supporting is not None and not isinstance(supporting, bool):
        raise DatasetError(f"{place}: 'is_supporting' is {_kind(supporting)}; it must be true or false.")
    return Context(_title(place, value), _text(place, "paragraph_text", value.get("paragraph_text")), supporting)


def _ctx(place: str, value: dict[str, Any]) -> Context:
    return Context(_title(place, value), _text(place, "text", value.get("text")))


def _contexts(place: str, key: str, values: Any, read: Callable[[str, dict[str, Any]], Context]) -> tuple[Context, ...]:
    if not isinstance(values, list) or not values:
        raise DatasetError(f"{place}: there are no contexts; {key!r} must be a list of at least one object.")
    contexts = []
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise DatasetError(f"{place}, context {number}: found {_kind(value)}; it must be an object.")
        contexts.append(read(f"{place}, context {number}", value))
    return tuple(contexts)


def _answers(place: str, key: str, values: Any) -> tuple[str, ...]:
    """Check a list of answers; blank ones and repetitions are left out."""
    if not isinstance(values, list):
        found = "missing" if values is None else _kind(values)
        raise DatasetError(f"{place}: {key!r} is {found}; it must be a list of texts.")
    for value in values:
        if not isinstance(value, str):
            raise DatasetError(f"{place}: {key!r} holds {_kind(value)}; it must be a list of texts.")
    return tuple(dict.fromkeys(_text(place, key, value) for value in values if value.strip()))


def _title(place: str, value: dict[str, Any]) -> str:
    title = value.get("title")
    if title is None:
        return ""
    if not isinstance(title, str):
        raise DatasetError(f"{place}: 'title' is {_kind(title)}; it must be a text.")
    return _whole(place, "title", title)


def _text(place: str, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        found = "missing" if value is None else "blank" if isinstance(value, str) else _kind(value)
        raise DatasetError(f"{place}: {key!r} is {found}; it must be a text that is not empty.")
    return _whole(place, key, value)


def _whole(place: str, key: str, value: str) -> str:
    """Refuse half surrogate pairs: JSON can spell them, but no tokenizer, table or hash takes them."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(
            f"{place}: {key!r} holds half a surrogate pair at character {error.start + 1}; write it whole."
        ) from None
    return value


def _kind(value: Any) -> str:
    """Name a JSON value's kind for a message."""
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]
