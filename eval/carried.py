"""Places of contexts carried from a machine with an embedder to one without, without the data's text.

A place is a context's number, from 0, among the distinct contexts of the data file. A file is bound to that data file
by its SHA-256, so retrieval may happen on one machine and answering on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from eval.errors import EvalError
from eval.provenance import describe_file
from inputs import Context


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


class CarriedPlaces(_Part):
    """Places of contexts of one data file.

    Attributes:
        what: it holds, for messages.
        option: of `eval.retrieval`, which writes it.
        data: what was searched.
        embedder: what it was searched with.
        contexts: distinct contexts of the data.
    """

    what: ClassVar[str]
    option: ClassVar[str]
    data: DataFile
    embedder: EmbedderIdentity
    contexts: PositiveInt

    @classmethod
    def load(cls, path: Path, data: Path) -> Self:
        """Read a file that `save` wrote.

        Args:
            path: of the file.
            data: the questions' file that it must belong to.

        Raises:
            EvalError: it cannot be read, is something else, or belongs to another data file.
        """
        write_one = f"write one with python -m eval.retrieval {cls.option}"
        try:
            carried = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise EvalError(f"The {cls.what} {path} cannot be read ({error.strerror}); {write_one}.") from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            found = f"{where}: {problem['msg']}" if where else problem["msg"]
            raise EvalError(f"{path} holds no {cls.what} ({found.rstrip('.')}); {write_one}.") from None
        sha256 = describe_file(data)["sha256"]
        if carried.data.sha256 != sha256:
            raise EvalError(
                f"{path} belongs to a data file {carried.data.name} with SHA-256 {carried.data.sha256[:12]}, but "
                f"{data} has {sha256[:12]}; give that file or retrieve again."
            )
        return carried

    def save(self, path: Path) -> None:
        """Write a file, making its folder; equal contents give equal bytes.

        Raises:
            EvalError: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise EvalError(
                f"{self.option} {path} cannot be written ({error.strerror}); name a writable file."
            ) from None

    def require_contexts(self, contexts: Sequence[Context]) -> None:
        """Refuse other contexts than were searched.

        Raises:
            EvalError: naming both counts.
        """
        if len(contexts) != self.contexts:
            raise EvalError(
                f"{self.contexts:,} contexts of {self.data.name} were searched, but it is read as {len(contexts):,} "
                "distinct ones now; retrieve again."
            )

    def describe(self, path: Path) -> dict[str, Any]:
        """Return what identifies it: the file's name, size and SHA-256, its embedder and how many contexts.

        Raises:
            EvalError: the file cannot be read.
        """
        return {**describe_file(path), "embedder": self.embedder.model_dump(), "contexts": self.contexts}
