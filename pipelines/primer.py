"""Primers: typical passages of a corpus that its other chunks are encoded behind.

In a prompt, a chunk follows other passages; encoded right behind the system prompt it has seen none. A primer stands in
for those of the later prompt, which it can where the corpus is of one kind: its rows are dropped from what is stored,
and its ids are part of the chunk's identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvstore.key import content_digest

PRIMER_TOKENS = 1024
LARGEST_SHARE = 8
"""A primer has at most one part in so many of its corpus: the chunks it is made of go without one themselves."""


def choose_primer(chunks: Sequence[tuple[int, ...]], tokens: int = PRIMER_TOKENS) -> tuple[tuple[int, ...], ...]:
    """Choose a corpus's primer, whatever the order of its chunks and however often each is there.

    Args:
        chunks: token ids of each chunk of the corpus.
        tokens: of the primer, at most.

    Returns:
        Whole distinct chunks by ascending content digest, up to the first with which they would have more than
        `tokens` tokens or more than an eighth of all distinct chunks' tokens; none where that is the first of all.
    """
    distinct = sorted(set(chunks), key=content_digest)
    room = min(tokens, sum(map(len, distinct)) // LARGEST_SHARE)
    return leading_chunks(distinct, room)


def leading_chunks(chunks: Sequence[tuple[int, ...]], tokens: int) -> tuple[tuple[int, ...], ...]:
    """The first of `chunks`, in their order, as long as together they have at most `tokens` tokens."""
    used = 0
    for count, chunk in enumerate(chunks):
        used += len(chunk)
        if used > tokens:
            return tuple(chunks[:count])
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class ChunkPrefixes:
    """What the chunks of a corpus are encoded behind.

    Attributes:
        head: ids of what comes first, such as the system prompt; may be empty.
        primer_chunks: token ids of each chunk of the primer, in order; may be none.
        primer: their ids in one.
        primed: head and primer in one: the same object for every chunk.
    """

    head: tuple[int, ...]
    primer_chunks: tuple[tuple[int, ...], ...] = ()
    primer: tuple[int, ...] = field(init=False, repr=False, compare=False)
    primed: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _unprimed: frozenset[tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        primer = tuple(chain.from_iterable(self.primer_chunks))
        object.__setattr__(self, "primer", primer)
        object.__setattr__(self, "primed", self.head + primer)
        object.__setattr__(self, "_unprimed", frozenset(self.primer_chunks))

    def behind(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids that a chunk is stored behind: the head alone for one of the primer, which would see itself."""
        return self.head if token_ids in self._unprimed else self.primed

    def candidates(self, token_ids: tuple[int, ...], bos: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What a chunk may be found behind, best first: what it is stored behind, the head, `bos` if there is one."""
        return list(dict.fromkeys(p for p in (self.behind(token_ids), self.head, bos) if p or not self.head))

    def groups(self, chunks: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
        """The chunks by what they are stored behind: each prefix with its chunks, in their order."""
        members: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for token_ids in chunks:
            members.setdefault(self.behind(token_ids), []).append(token_ids)
        return list(members.items())
