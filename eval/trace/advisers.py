"""What a predictor is compared with: one that knows the future, popularity of the past, chance, and no advice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from cacheblend.protocols import Advice, PredictorEvent, QuestionQueued, QuestionStarted
from kvstore.key import ChunkIdentity

GUESS_CONFIDENCE = 0.01
"""Of a random guess: more than nothing, less than any evidence."""
GUESSES = 16
"""Random guesses a question."""


class _Adviser:
    """Holds nothing that has to be given back."""

    def close(self) -> None:
        """See `SpeculativePredictor.close`."""


class OracleAdviser(_Adviser):
    """Knows all requests to come: what is used next is advised first.

    Args:
        prompts: chunks of each request, in the order of arrival.
        names: the requests' ids, in the same order.
    """

    def __init__(self, prompts: Sequence[tuple[ChunkIdentity, ...]], names: Sequence[str]) -> None:
        self._ahead = dict(zip(names, prompts, strict=True))

    def observe(self, event: PredictorEvent) -> None:
        """A question that has started needs nothing any more."""
        if isinstance(event, QuestionStarted):
            self._ahead.pop(event.request_id, None)

    def advice(self, limit: int) -> list[Advice]:
        """The next chunks, each with a confidence that falls evenly with its place among them."""
        chunks: dict[ChunkIdentity, float] = {}
        for prompt in self._ahead.values():
            if len(chunks) >= limit:
                break
            for chunk in prompt:
                chunks.setdefault(chunk, 1 - len(chunks) / limit)
        return [Advice(chunk, confidence) for chunk, confidence in chunks.items()][:limit]


class PopularityAdviser(_Adviser):
    """Counts uses of the past and advises the most used, with the share of past questions that used them."""

    def __init__(self) -> None:
        self._uses: Counter[ChunkIdentity] = Counter()
        self._questions = 0

    def observe(self, event: PredictorEvent) -> None:
        """Count a question's chunks."""
        if isinstance(event, QuestionQueued):
            self._questions += 1
            self._uses.update(event.chunks)

    def advice(self, limit: int) -> list[Advice]:
        """The most used so far; of those used equally often, the first met."""
        return [Advice(chunk, uses / self._questions) for chunk, uses in self._uses.most_common(limit)]


class RandomAdviser(_Adviser):
    """Advises a few chunks drawn evenly from all, anew for each question.

    Args:
        chunks: all that there are.
        seed: of the draws.
    """

    def __init__(self, chunks: Sequence[ChunkIdentity], seed: int) -> None:
        self._chunks = chunks
        self._draw = random.Random(seed)
        self._guesses: list[ChunkIdentity] = []

    def observe(self, event: PredictorEvent) -> None:
        """Draw anew for a question."""
        if isinstance(event, QuestionQueued):
            self._guesses = self._draw.sample(self._chunks, min(GUESSES, len(self._chunks)))

    def advice(self, limit: int) -> list[Advice]:
        """The draws of the newest question."""
        return [Advice(chunk, GUESS_CONFIDENCE) for chunk in self._guesses[:limit]]


class NoAdviser(_Adviser):
    """Advises nothing."""

    def observe(self, event: PredictorEvent) -> None:
        """Nothing is remembered."""

    def advice(self, limit: int) -> list[Advice]:
        """None."""
        return []
