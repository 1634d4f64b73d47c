"""Nearest contexts: for each context of the data those that are most like it, carried as places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import NonNegativeInt

from eval.carried import CarriedPlaces
from eval.errors import EvalError
from inputs import Context

NEAREST = 8
"""Contexts that are carried for each context: more than a primer has room for."""


class NearestContexts(CarriedPlaces):
    """The contexts nearest to each context of one data file.

    Attributes:
        format, version: of the file.
        nearest: by a context's place, the places of others, the nearest first.
    """

    what: ClassVar[str] = "nearest contexts"
    option: ClassVar[str] = "--nearest"
    format: Literal["nearest contexts"] = "nearest contexts"
    version: Literal[1] = 1
    nearest: tuple[tuple[NonNegativeInt, ...], ...]

    def of(self, contexts: Sequence[Context]) -> Sequence[Sequence[int]]:
        """Return the nearest of each of the data file's distinct contexts.

        Raises:
            EvalError: these are not the contexts that were searched, or a place is no other context's.
        """
        self.require_contexts(contexts)
        for place, others in enumerate(self.nearest):
            wrong = [other for other in others if other >= len(contexts) or other == place]
            if wrong:
                raise EvalError(f"Context {place} has the nearest context {wrong[0]}, which is none; retrieve again.")
        if len(self.nearest) != len(contexts):
            raise EvalError(f"{len(self.nearest):,} of {len(contexts):,} contexts have a nearest one; retrieve again.")
        return self.nearest
