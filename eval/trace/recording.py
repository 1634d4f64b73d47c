"""Recorded sessions: who asked what, and which documents the prompt held. The file format has no times."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError

CHARACTERS_PER_TOKEN = 4
"""An estimate: the file names no tokenizer. Common subword vocabularies take about 4 characters of English a token."""

_DOCUMENT = re.compile(r"\[Document (\d+): ")
_QUESTION = "Question:"


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with the documents of its prompt in prompt order and the candidates ranked next, best first."""

    question: str
    documents: tuple[str, ...]
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One user's turns, in order."""

    id: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """Sessions without times.

    Attributes:
        sessions: in file order.
        tokens: document to its number of tokens, for every document and candidate.
        texts: document to its text; empty where the sessions were generated.
    """

    sessions: tuple[RecordedSession, ...]
    tokens: Mapping[str, int]
    texts: Mapping[str, str]


def read_recording(path: Path) -> Recording:
    """Read JSON lines, one session a line, as MTRAG's retrieval traces are written.

    A line is `{"session_id", "turns": [{"document_ids", "prompt"}]}`; the prompt holds `[Document n: TEXT]` for each
    id, in order, and after them `Question: TEXT`. A document's tokens are its characters over 4, rounded up.

    Raises:
        EvalError: the file cannot be read, is empty, or a line is of another shape; the message names the line.
    """
    try:
        # Not splitlines: it also splits at characters that JSON strings may hold.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"The trace {path} cannot be read ({error}); name a readable file of JSON lines.") from error
    texts: dict[str, str] = {}
    sessions = tuple(
        _session(line, f"{path}, line {number}", texts) for number, line in enumerate(lines, start=1) if line.strip()
    )
    if not sessions:
        raise EvalError(f"The trace {path} holds no session; give a file with one session a line.")
    if len({session.id for session in sessions}) < len(sessions):
        raise EvalError(f"The trace {path} has two sessions with one session_id; give each its own.")
    tokens = {document: math.ceil(len(text) / CHARACTERS_PER_TOKEN) for document, text in texts.items()}
    return Recording(sessions, tokens, texts)


def generate_recording(sessions: int, seed: int, candidates: int = 20) -> Recording:
    """Return sessions that behave as recorded ones do, for tests: documents reappear in another order a turn later.

    A turn keeps most documents of the one before, drops a few and meets up to three new ones; one in ten of the new
    ones is shared by all sessions. A turn's candidates name each new document of the next turn with a probability of
    one half, among others of the trace.

    Args:
        sessions: how many, at least 1.
        seed: of everything drawn.
        candidates: how many a turn has.

    Raises:
        EvalError: there is no session.
    """
    if sessions < 1:
        raise EvalError(f"{sessions} sessions cannot be generated; give 1 or more.")
    draw = random.Random(seed)
    shared = [f"shared-{number}" for number in range(10)]
    plans = {f"session-{number}": _draw_prompts(f"session-{number}", shared, draw) for number in range(sessions)}
    documents = sorted({document for prompts in plans.values() for prompt in prompts for document in prompt})
    recorded = tuple(
        RecordedSession(name, tuple(_draw_turns(prompts, documents, candidates, draw)))
        for name, prompts in plans.items()
    )
    return Recording(recorded, dict(zip(documents, draw_tokens(len(documents), draw), strict=True)), {})


def draw_tokens(documents: int, draw: random.Random) -> list[int]:
    """Return a number of tokens for each document: log-normal, median 250, from 16 to 4,096."""
    return [min(4096, max(16, round(draw.lognormvariate(math.log(250), 0.7)))) for _ in range(documents)]


def _session(line: str, place: str, texts: dict[str, str]) -> RecordedSession:
    """Parse a line and enter its documents' texts into `texts`."""
    try:
        record = json.loads(line)
        return RecordedSession(str(record["session_id"]), tuple(_turn(turn, place, texts) for turn in record["turns"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise EvalError(
            f"{place}: this is no session ({type(error).__name__}: {error}); a line is a JSON object with session_id "
            "and turns, each with document_ids and prompt."
        ) from error


def _turn(record: Mapping[str, Any], place: str, texts: dict[str, str]) -> Turn:
    documents, prompt = tuple(map(str, record["document_ids"])), str(record["prompt"])
    body, mark, question = prompt.rpartition(_QUESTION)
    if not mark:
        raise EvalError(f"{place}: a prompt has no {_QUESTION!r} after its documents; give the prompt as it was sent.")
    beginnings = _beginnings(body, len(documents), place)
    ends = [*(beginning.start() for beginning in beginnings[1:]), len(body)]
    # Without documents there is an end and no beginning.
    for document, beginning, end in zip(documents, beginnings, ends, strict=False):
        text = body[beginning.end() : end].rstrip().removesuffix("]")
        if texts.setdefault(document, text) != text:
            raise EvalError(
                f"{place}: the document {document!r} has another text than before; give each text its own id."
            )
    return Turn(question.strip(), tuple(dict.fromkeys(documents)))


def _beginnings(body: str, documents: int, place: str) -> list[re.Match[str]]:
    """Where the documents numbered 1, 2, ... begin; a text may quote such a mark, so only the next number counts."""
    found: list[re.Match[str]] = []
    for match in _DOCUMENT.finditer(body):
        if int(match[1]) == len(found) + 1:
            found.append(match)
    if len(found) != documents:
        raise EvalError(f"{place}: a prompt holds {len(found)} documents but names {documents}; give an id for each.")
    return found


def _draw_prompts(session: str, shared: list[str], draw: random.Random) -> list[list[str]]:
    prompts: list[list[str]] = []
    current: list[str] = []
    met = 0
    for _ in range(draw.randint(4, 10)):
        current = [document for document in current if draw.random() < 0.9]
        for _ in range(draw.randint(1, 3)):
            met += 1
            document = draw.choice(shared) if draw.random() < 0.1 else f"{session}-{met}"
            current.append(document)
        current = list(dict.fromkeys(current))
        draw.shuffle(current)
        prompts.append(list(current))
    return prompts


def _draw_turns(prompts: list[list[str]], documents: list[str], candidates: int, draw: random.Random) -> list[Turn]:
    turns = []
    for number, prompt in enumerate(prompts):
        following = prompts[number + 1] if number + 1 < len(prompts) else []
        coming = [document for document in following if document not in prompt and draw.random() < 0.5]
        others = draw.sample(documents, min(candidates, len(documents)))
        ranked = [document for document in dict.fromkeys([*coming, *others]) if document not in prompt][:candidates]
        draw.shuffle(ranked)
        turns.append(Turn(f"question {number + 1}", tuple(prompt), tuple(ranked)))
    return turns
