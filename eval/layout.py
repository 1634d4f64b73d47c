"""A prompt laid out as token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.selectors import Selector


@dataclass(frozen=True)
class LaidOutPrompt:
    """A prompt as token ids: what precedes its chunks, the chunks in their order, the question."""

    head: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole prompt."""
        return (*self.head, *(token for chunk in self.chunks for token in chunk), *self.question)

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.head) + sum(map(len, self.chunks)) + len(self.question)

    def plan(
        self, segment: Callable[[tuple[int, ...]], Segment], selector: Selector | None, carry_drift: bool = False
    ) -> BlendPlan:
        """The prompt as a plan; `segment` makes each chunk's segment, reused or fresh."""
        head = (Segment(SegmentRole.SYSTEM, self.head),) if self.head else ()
        chunks = map(segment, self.chunks)
        return BlendPlan((*head, *chunks, Segment(SegmentRole.QUESTION, self.question)), selector, carry_drift)
