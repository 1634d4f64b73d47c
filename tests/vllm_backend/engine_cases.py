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


def finish(engine: EngineBench) -> dict[str, Any]:
    """Step until nothing is left; answers by request."""
    answers = {}
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            if output.finished:
                answers[output.request_id] = engine.answer(output)
    return answers


def evict_tail(engine: EngineBench, request: Any, first: int) -> None:
    """Let go of a waiting request's cached blocks from number `first` on, as a full pool does."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    cached = [pool.get_cached_block(block_hash, [0]) for block_hash in request.block_hashes[first:]]
    found = {blocks[0].block_id for blocks in cached if blocks}
    assert found
    pool.evict_blocks(found)
