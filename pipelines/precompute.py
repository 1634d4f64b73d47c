"""Prefills a corpus's chunks into the store. Knows no retriever."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.events import NotStored, StoreEvent
from kvstore.key import ChunkIdentity

if TYPE_CHECKING:
    from pipelines.runners import ChunkShelf

CHUNKS_PER_CALL = 4

Collect = Callable[[Sequence[ChunkIdentity]], None]


@dataclass(frozen=True, slots=True)
class PrecomputeProgress:
    """How far a precomputation is: distinct chunks and tokens done, cached ones included; bytes of KV computed."""

    chunks_done: int
    chunks: int
    tokens_done: int
    tokens: int
    kv_bytes: int


@dataclass
class PrecomputeSummary:
    """What a precomputation did.

    Attributes:
        chunks: chunks of the corpus.
        distinct: different ones among them.
        cached: of these, already in the store.
        computed: of these, prefilled now.
        tokens: tokens of the distinct chunks.
        tokens_computed: tokens prefilled now.
        bytes_per_token: bytes of KV one token takes.
        kv_bytes: bytes of KV computed now.
        seconds: wall time.
        not_on_disk: chunks that the disk did not take, by reason.
        not_kept: chunks that no tier had room for: they were computed in vain.
        dry_run: whether nothing was computed on purpose; `computed` then counts what would be.
    """

    chunks: int
    distinct: int
    cached: int
    computed: int = 0
    tokens: int = 0
    tokens_computed: int = 0
    bytes_per_token: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0
    not_on_disk: dict[str, int] = field(default_factory=dict)
    not_kept: int = 0
    dry_run: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)


def precompute_chunks(
    identities: Sequence[ChunkIdentity],
    shelf: ChunkShelf,
    collect: Collect,
    bytes_per_token: int,
    on_progress: Callable[[PrecomputeProgress], None] | None = None,
    dry_run: bool = False,
    chunks_per_call: int = CHUNKS_PER_CALL,
) -> PrecomputeSummary:
    """Put the KV of every chunk into the store that is not there yet.

    Each chunk is stored as soon as it is computed, so an interrupted run goes on where it stopped.

    Args:
        identities: the corpus's chunks behind one prefix; repeats are computed once.
        shelf: which chunks there are; a store is one.
        collect: computes some chunks and stores them.
        bytes_per_token: bytes of KV one token takes.
        on_progress: called after each call of `collect`, and once before the first.
        dry_run: only say what would be done.
        chunks_per_call: chunks handed to `collect` at once.

    Returns:
        The summary.
    """
    started = time.perf_counter()
    distinct = list({identity.key: identity for identity in identities}.values())
    missing = [identity for identity in distinct if shelf.lookup(identity) is None]
    summary = PrecomputeSummary(
        chunks=len(identities),
        distinct=len(distinct),
        cached=len(distinct) - len(missing),
        tokens=_tokens(distinct),
        bytes_per_token=bytes_per_token,
        dry_run=dry_run,
    )
    if dry_run:
        summary.computed, summary.tokens_computed = len(missing), _tokens(missing)
        summary.kv_bytes = summary.tokens_computed * bytes_per_token
        return summary
    refused: Counter[str] = Counter()

    def note(event: StoreEvent) -> None:
        if isinstance(event, NotStored):
            refused[event.reason.value] += 1

    unsubscribe = shelf.subscribe(note)
    try:
        for first in range(0, len(missing), chunks_per_call):
            _report(on_progress, summary, missing)
            batch = missing[first : first + chunks_per_call]
            collect(batch)
            summary.not_kept += sum(shelf.lookup(identity) is None for identity in batch)
            summary.computed += len(batch)
            summary.tokens_computed += _tokens(batch)
            summary.kv_bytes = summary.tokens_computed * bytes_per_token
        _report(on_progress, summary, missing)
    finally:
        unsubscribe()
        summary.seconds = time.perf_counter() - started
        summary.not_on_disk = dict(refused)
    return summary


def _tokens(identities: Sequence[ChunkIdentity]) -> int:
    return sum(len(identity.token_ids) for identity in identities)


def _report(
    on_progress: Callable[[PrecomputeProgress], None] | None,
    summary: PrecomputeSummary,
    missing: Sequence[ChunkIdentity],
) -> None:
    if on_progress is None:
        return
    cached_tokens = summary.tokens - _tokens(missing)
    on_progress(
        PrecomputeProgress(
            summary.cached + summary.computed,
            summary.distinct,
            cached_tokens + summary.tokens_computed,
            summary.tokens,
            summary.kv_bytes,
        )
    )
