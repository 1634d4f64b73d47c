"""Retrieved contexts as ids: what the retriever chose for each question, carried without the data's text.

An id is a context's place, from 0, among the distinct contexts of the data file. The file is bound to that data
file by its SHA-256, so retrieval may happen on one machine and answering on another, which needs no embedder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from eval.errors import EvalError
from eval.provenance import describe_file
from inputs import Context, Example, distinct_contexts

_WRITE_ONE = "write one with python -m eval.retrieval --ids"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DataFile(_Part):
    """The data file that was searched: its name, size in bytes and SHA-256."""

    name: str
    bytes: NonNegativeInt
    sha256: str


class EmbedderIdentity(_Part):
    """The embedder, by name and by a hash of its weights and settings."""

    name: str
    fingerprint: str


class RetrievedContexts(_Part):
    """The contexts chosen for each question of one data file.

    Attributes:
        format, version: of the file.
        data: what was searched.
        embedder: what it was searched with.
        contexts: distinct contexts of the data.
        top_k: contexts retrieved for a question; all of them where the data have fewer.
        retrieved: a question's id to its contexts' ids, best first; questions are in the data's order.
    """

    format: Literal["retrieved contexts"] = "retrieved contexts"
    version: Literal[1] = 1
    data: DataFile
    embedder: EmbedderIdentity
    contexts: PositiveInt
    top_k: PositiveInt
    retrieved: Mapping[str, Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]]

    @classmethod
    def load(cls, path: Path) -> RetrievedContexts:
        """Read a file that `save` wrote.

        Raises:
            EvalError: it cannot be read, or is something else.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise EvalError(f"The retrieved contexts {path} cannot be read ({error.strerror}); {_WRITE_ONE}.") from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            what = f"{where}: {problem['msg']}" if where else problem["msg"]
            raise EvalError(f"{path} holds no retrieved contexts ({what.rstrip('.')}); {_WRITE_ONE}.") from None

    def save(self, path: Path) -> None:
        """Write a file, making its folder; equal contents give equal bytes.

        Raises:
            EvalError: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise EvalError(f"--ids {path} cannot be written ({error.strerror}); name a writable file.") from None

    def give(self, examples: Sequence[Example]) -> list[Example]:
        """Return the questions, each over the contexts that were retrieved for it, best first.

        Args:
            examples: all questions of the data file.

        Raises:
            EvalError: these are not the questions that were retrieved for, or an id is no context's or there twice.
        """
        contexts = distinct_contexts(examples)
        if len(contexts) != self.contexts:
            raise EvalError(
                f"{self.contexts:,} contexts of {self.data.name} were searched, but it is read as {len(contexts):,} "
                "distinct ones now; retrieve again."
            )
        return [replace(example, contexts=self._contexts_of(example, contexts)) for example in examples]

    def _contexts_of(self, example: Example, contexts: Sequence[Context]) -> tuple[Context, ...]:
        places = self.retrieved.get(example.id)
        if places is None:
            raise EvalError(
                f"No contexts were retrieved for question {example.id}; retrieve for all of {self.data.name}."
            )
        unknown = [place for place in places if place >= len(contexts)]
        if unknown:
            raise EvalError(
                f"Question {example.id} has the retrieved context {unknown[0]}, but {self.data.name} has "
                f"{len(contexts):,} distinct ones, counted from 0; retrieve again."
            )
        if len(set(places)) < len(places):
            raise EvalError(f"Question {example.id} has a retrieved context twice in {list(places)}; retrieve again.")
        return tuple(contexts[place] for place in places)


def give_retrieved(path: Path, data: Path, examples: Sequence[Example]) -> list[Example]:
    """Return the questions, each over the contexts that a file says were retrieved for it, best first.

    Args:
        path: of the retrieved contexts.
        data: the questions' file.
        examples: all of its questions.

    Raises:
        EvalError: the file cannot be used, or belongs to another data file.
    """
    chosen = RetrievedContexts.load(path)
    sha256 = describe_file(data)["sha256"]
    if chosen.data.sha256 != sha256:
        raise EvalError(
            f"{path} belongs to a data file {chosen.data.name} with SHA-256 {chosen.data.sha256[:12]}, but {data} has "
            f"{sha256[:12]}; give that file or retrieve again."
        )
    return chosen.give(examples)


def describe_retrieved(path: Path) -> dict[str, Any]:
    """Return what identifies retrieved contexts: the file's name, size and SHA-256, its embedder and how many.

    Raises:
        EvalError: the file cannot be used.
    """
    chosen = RetrievedContexts.load(path)
    origin = {"embedder": chosen.embedder.model_dump(), "top_k": chosen.top_k, "contexts": chosen.contexts}
    return {**describe_file(path), **origin}
