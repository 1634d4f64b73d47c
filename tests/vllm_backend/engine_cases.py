"""Prompts that several tests ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_bench import Ask, EngineBench

SELECTORS = ("none", "chunk_head", "deviation", "query", "chunk_head+query", "chunk_head+deviation", "full")
GRADUAL = {"selector": "deviation", "ratio": 0.2, "check_layers": [1, 2]}

Ids = tuple[int, ...]


def prompt(
    head: Sequence[int],
    chunks: Sequence[Sequence[int]],
    question: Sequence[int],
    fresh: Sequence[int] = (),
    **options: Any,
) -> Ask:
    """A prompt of `head`, reusable chunks (but those whose index is in `fresh`) and `question`."""
    parts = [(tuple(head), False)] if head else []
    parts += [(tuple(chunk), index not in fresh) for index, chunk in enumerate(chunks)]
    return Ask((*parts, (tuple(question), False)), options)


class Corpus:
    """A head and some chunks collected behind it, the same for one bench."""

    LENGTHS = (150, 123, 91, 64)

    def __init__(self, bench: EngineBench) -> None:
        self.head: Ids = bench.ids(37, 1)
        self.chunks: list[Ids] = [bench.ids(length, 10 + length) for length in self.LENGTHS]
        self.question: Ids = bench.ids(20, 5)
        bench.collect(self.chunks, self.head)

    def ask(self, *order: int, question: Ids | None = None, fresh: Sequence[int] = (), **options: Any) -> Ask:
        """The chunks of these numbers, in this order."""
        chunks = [self.chunks[number] for number in order]
        return prompt(self.head, chunks, question or self.question, fresh, **options)
