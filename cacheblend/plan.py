"""Blend plans: the segments of one prompt, laid out at positions. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from cacheblend.errors import BlendError
from kvstore.key import ChunkIdentity, ChunkKey

if TYPE_CHECKING:
    from cacheblend.selectors.base import Selector


class Policy(StrEnum):
    """How the caller wants a prompt prefilled."""

    FULL = "full"
    BLEND = "blend"
    AUTO = "auto"


class SegmentRole(StrEnum):
    """What a segment is to the prompt."""

    SYSTEM = "system"
    CHUNK = "chunk"
    QUESTION = "question"


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a prompt.

    Attributes:
        role: what the segment is.
        token_ids: its token ids, at least one.
        identity: the stored chunk whose KV is reused; None makes every row of the segment fresh.
        reason: why a chunk is fresh although it was asked for as reusable; None otherwise.
    """

    role: SegmentRole
    token_ids: tuple[int, ...]
    identity: ChunkIdentity | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise BlendError(f"A {self.role} segment has no tokens; leave it out or give it text.")
        if self.identity is not None and self.identity.token_ids != self.token_ids:
            raise BlendError("A segment's token ids differ from its chunk's; build both from the same ids.")

    @property
    def reused(self) -> bool:
        """Whether the segment's rows start from stored KV."""
        return self.identity is not None

    def as_fresh(self, reason: str) -> Segment:
        """The same segment with every row computed, and why."""
        return replace(self, identity=None, reason=reason)


@dataclass(frozen=True, slots=True)
class Span:
    """A segment at its place: rows `start` to `end` (exclusive) of the prompt."""

    segment: Segment
    start: int
    end: int

    @property
    def length(self) -> int:
        """Rows in the span."""
        return self.end - self.start


@dataclass(frozen=True)
class BlendPlan:
    """The segments of one prompt in order, and the selector that picks the reusable rows to recompute.

    The last segment is the question; it is always fresh. A plan without a reused segment is a full prefill.

    Attributes:
        segments: in order.
        selector: picks the reusable rows to recompute.
        carry_drift: whether the others are moved by the drift of those (`cacheblend.drift`), where there can be both.

        stored_by_us: whether the chunks' KV is what this model computed behind what their identities say, and not
            what a user has put there (`old_kvs`, or under a namespace).

    Raises:
        BlendError: if there is no segment, the last one is not a fresh question, or another one is a question.
    """

    segments: tuple[Segment, ...]
    selector: Selector | None = None
    carry_drift: bool = False
    stored_by_us: bool = True

    def __post_init__(self) -> None:
        if not self.segments or self.segments[-1].role is not SegmentRole.QUESTION:
            raise BlendError("A plan ends with the question; add a question segment last.")
        if self.segments[-1].reused:
            raise BlendError("The question is always recomputed; give it no stored chunk.")
        if any(s.role is SegmentRole.QUESTION for s in self.segments[:-1]):
            raise BlendError("A plan has one question, and it comes last.")
        if self.reused_tokens and self.selector is None:
            raise BlendError("A plan that reuses chunks needs a selector; `none` is plain reuse.")

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids of the prompt in order."""
        ids: list[int] = []
        for segment in self.segments:
            # A list takes a tuple whole, several times faster than an iterator over its ids.
            ids += segment.token_ids
        return tuple(ids)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The segments with their positions, in order."""
        return tuple(_lay_out(self.segments))

    @property
    def rule(self) -> str | None:
        """What says which rows are recomputed, and what becomes of the others; None without a selector."""
        if self.selector is None:
            return None
        return f"{self.selector.spec}{'+drift' if self.moves_rows else ''}"

    @property
    def moves_rows(self) -> bool:
        """Whether rows that are left alone may be moved by the drift of those that are recomputed."""
        selector = self.selector
        if selector is None or selector.recomputes_nothing or selector.recomputes_everything:
            return False
        return self.carry_drift

    @property
    def length(self) -> int:
        """Rows of the prompt."""
        return len(self.token_ids)

    @property
    def question(self) -> Span:
        """The question's span."""
        return self.spans[-1]

    @cached_property
    def reused(self) -> tuple[Span, ...]:
        """The spans that start from stored KV, in order."""
        return tuple(span for span in self.spans if span.segment.reused)

    @cached_property
    def choosable(self) -> tuple[Span, ...]:
        """The reused spans whose rows the selector may choose.

        A chunk that stands where it was encoded, behind the very tokens that it was encoded behind, has full prefill's
        own KV already: its rows are recomputed only if all are, or where they are named one by one. There are
        none where the selector recomputes nothing, so that nobody lists all rows in vain.
        """
        if self.selector is not None and self.selector.recomputes_nothing:
            return ()
        if self.selector is None or not self.selector.spares_exact_rows or not self.stored_by_us:
            return self.reused
        return tuple(span for span in self.reused if not self._is_exact(span))

    def _is_exact(self, span: Span) -> bool:
        identity = span.segment.identity
        if identity is None or identity.base_position != span.start:
            return False
        return identity.prefix_ids == self.token_ids[: span.start]

    @property
    def reused_tokens(self) -> int:
        """Reusable rows of the prompt."""
        return sum(len(s.token_ids) for s in self.segments if s.reused)

    @cached_property
    def keys(self) -> tuple[ChunkKey, ...]:
        """Keys of the reused chunks in order, repeated where a chunk is used twice."""
        return tuple(s.identity.key for s in self.segments if s.identity is not None)

    @cached_property
    def chunks(self) -> tuple[ChunkIdentity, ...]:
        """The reused chunks, each once, in the order of their first use."""
        found = {s.identity.key: s.identity for s in self.segments if s.identity is not None}
        return tuple(found.values())

    @property
    def chunks_read(self) -> tuple[ChunkIdentity, ...]:
        """Those of `chunks` whose stored KV is read: none if the selector has every row of them computed anyway.

        What is not read need not be loaded, pinned or waited for, and may vanish once the plan is made.
        """
        in_vain = self.selector is not None and self.selector.recomputes_everything
        return () if in_vain else self.chunks

    @property
    def fallback_reasons(self) -> tuple[str, ...]:
        """Why chunks that were asked for as reusable are fresh, in order of segments."""
        return tuple(s.reason for s in self.segments if s.reason is not None)

    def with_fresh(self, reasons: Mapping[ChunkKey, str]) -> BlendPlan:
        """The plan in which the chunks named in `reasons` are fresh rows, each for the reason given."""
        if not reasons:
            # Whoever asks at every step of a request's way keeps what the plan has laid out already.
            return self
        segments = tuple(
            s.as_fresh(reasons[s.identity.key]) if s.identity is not None and s.identity.key in reasons else s
            for s in self.segments
        )
        return replace(self, segments=segments)

    def as_full(self, reason: str | None = None) -> BlendPlan:
        """The same prompt with nothing reused; `reason` is noted on every segment that was."""
        segments = tuple(replace(s, identity=None, reason=reason) if s.reused else s for s in self.segments)
        return BlendPlan(segments)


def require_fits(prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Refuse a prompt that leaves no room for its answer.

    Raises:
        BlendError: naming the three numbers.
    """
    if prompt_tokens + max_tokens > max_model_len:
        raise BlendError(
            f"A prompt of {prompt_tokens} tokens and {max_tokens} new ones do not fit the model's context of "
            f"{max_model_len}; shorten the question, use fewer or smaller documents, or ask for fewer new tokens."
        )


def require_known(token_ids: Sequence[int], vocabulary: int) -> None:
    """Refuse token ids that the model has no embedding for.

    Raises:
        BlendError: naming the id and the vocabulary's size.
    """
    strange = next((token for token in token_ids if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise BlendError(
            f"Token id {strange} is outside the model's vocabulary of {vocabulary}; use the model's own tokenizer."
        )


def full_prefill_plan(token_ids: Sequence[int]) -> BlendPlan:
    """A prompt of `token_ids` with nothing reused.

    Raises:
        BlendError: if there are no token ids.
    """
    return BlendPlan((Segment(SegmentRole.QUESTION, tuple(token_ids)),))


def _lay_out(segments: Sequence[Segment]) -> Iterator[Span]:
    start = 0
    for segment in segments:
        end = start + len(segment.token_ids)
        yield Span(segment, start, end)
        start = end
