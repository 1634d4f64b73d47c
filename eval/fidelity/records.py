"""Results as they finish: one JSON object a line, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from eval.errors import EvalError


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """What one row of the report (arm and tier) answered to one question.

    Attributes:
        question: the question's id.
        arm: the arm's name.
        tier: `warm` or `cold`.
        text: the answer's first line.
        token_ids: the answer's ids up to the end of its first line.
        em, f1: official scores, 0 to 1.
        token_f1: CacheBlend's, 0 to 1.
        ttft_ms: from submission to the first token, milliseconds.
        parts_ms: what of it each part took.
        prompt_tokens: rows of the prompt.
        reused_tokens, recomputed_tokens, recomputed_ratio: see `BlendReport`.
        bytes_loaded: bytes of KV read, by the tier they were in at submission.
        fallback_reasons: why chunks were prefilled as fresh rows.
        cpu_s, wall_s: seconds the process spent on the answer; 0 where the model runs in other processes.
    """

    question: str
    arm: str
    tier: str
    text: str
    token_ids: list[int]
    em: float
    f1: float
    token_f1: float
    ttft_ms: float
    parts_ms: dict[str, float]
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    recomputed_ratio: float
    bytes_loaded: dict[str, int]
    fallback_reasons: list[str]
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class DivergenceRecord:
    """KL(full || arm) in nats for one question: at the first answer token, and the mean along full's answer."""

    question: str
    arm: str
    kl_first: float
    kl_answer: float
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """Chunk KV computed for one question: chunks, tokens, bytes of KV, seconds. Chunks already there count nothing."""

    question: str
    chunks: int
    tokens: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GateRecord:
    """What the gates found on one question: nats along full prefill's answer, see `GateSummary`."""

    question: str
    noise_floor: float
    recompute_all: float
    blanked: float
    answer_changed: bool


Record = AnswerRecord | DivergenceRecord | BuildRecord | GateRecord
_KINDS: dict[str, type[Record]] = {
    "answer": AnswerRecord,
    "divergence": DivergenceRecord,
    "build": BuildRecord,
    "gate": GateRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class ResultLog:
    """The records of a run, in memory and in a file; what is appended survives whatever comes after.

    Args:
        path: made if it is not there. A last line that was cut off is dropped from the file.

    Raises:
        EvalError: a line is not a record.
    """

    def __init__(self, path: Path) -> None:
        self.answers: dict[tuple[str, str, str], AnswerRecord] = {}
        self.divergences: dict[tuple[str, str], DivergenceRecord] = {}
        self.builds: dict[str, BuildRecord] = {}
        self.gates: dict[str, GateRecord] = {}
        self._path = path
        _drop_cut_line(path)
        self.catch_up()
        self._file: TextIO = path.open("a", encoding="utf-8")

    def catch_up(self) -> None:
        """Take in what is in the file, that of other shards too.

        Raises:
            EvalError: a line is not a record.
        """
        for number, line in enumerate(self._path.read_bytes().split(b"\n")[:-1], start=1):
            self._enter(_parse(line, f"{self._path}, line {number}"))

    def append(self, record: Record) -> None:
        """Keep a record, on disk before this returns."""
        self._file.write(json.dumps({"record": _NAMES[type(record)], **asdict(record)}, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._enter(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> ResultLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, record: Record) -> None:
        if isinstance(record, AnswerRecord):
            self.answers[record.question, record.arm, record.tier] = record
        elif isinstance(record, DivergenceRecord):
            self.divergences[record.question, record.arm] = record
        elif isinstance(record, BuildRecord):
            self.builds[record.question] = record
        else:
            self.gates[record.question] = record


def _drop_cut_line(path: Path) -> None:
    """Make the file, or end it with the last whole line."""
    with path.open("ab+") as file:
        file.seek(0)
        content = file.read()
        # Only where there is something to drop: another shard may be adding whole lines meanwhile.
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _parse(line: bytes, place: str) -> Record:
    try:
        value: Any = json.loads(line)
        kind = _KINDS[value.pop("record")]
        if value.keys() != {field.name for field in fields(kind)}:
            raise KeyError(*value)
        return kind(**value)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise EvalError(f"{place}: this is no result of this version; start again with --fresh.") from None
