"""What every data set becomes here: examples, each a question with its answers and its contexts."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Context:
    """One document offered to a question.

    `title` may be empty, `text` never is; both are kept exactly as the file gives them. `supporting` says
    whether the question needs this document; it is None where the data set does not tell.
    """

    title: str
    text: str
    supporting: bool | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its accepted answers and its contexts.

    `answers` begins with the answer, its aliases follow; `contexts` are in file order. There is at least one
    of each; `id` is unique within the file.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    contexts: tuple[Context, ...]


def distinct_contexts(examples: Iterable[Example]) -> list[Context]:
    """Return each context once, by title and text, in the order in which they are first met.

    Whether a context supports a question belongs to that question, so `supporting` is None in the result.
    """
    everything = (context for example in examples for context in example.contexts)
    return list(dict.fromkeys(replace(context, supporting=None) for context in everything))
