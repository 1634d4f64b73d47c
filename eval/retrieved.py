"""Retrieved contexts: what the retriever chose for each question, carried as places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from eval.carried import CarriedPlaces
from eval.errors import EvalError
from inputs import Context, Example, distinct_contexts


class RetrievedContexts(CarriedPlaces):
    """The contexts chosen for each question of one data file.

    Attributes:
        format, version: of the file.
        top_k: contexts retrieved for a question; all of them where the data have fewer.
        retrieved: a question's id to its contexts' places, best first; questions are in the data's order.
    """

    what: ClassVar[str] = "retrieved contexts"
    option: ClassVar[str] = "--ids"
    format: Literal["retrieved contexts"] = "retrieved contexts"
    version: Literal[1] = 1
    top_k: PositiveInt
    retrieved: Mapping[str, Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]]

    def give(self, examples: Sequence[Example]) -> list[Example]:
        """Return the questions, each over the contexts that were retrieved for it, best first.

        Args:
            examples: all questions of the data file.

        Raises:
            EvalError: these are not the questions that were retrieved for, or a place is no context's or there twice.
        """
        contexts = distinct_contexts(examples)
        self.require_contexts(contexts)
        return [replace(example, contexts=self._contexts_of(example, contexts)) for example in examples]

    def describe(self, path: Path) -> dict[str, Any]:
        """See `CarriedPlaces.describe`; says how many were retrieved as well."""
        return {**super().describe(path), "top_k": self.top_k}

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
