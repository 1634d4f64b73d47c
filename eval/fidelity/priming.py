"""What chunks are encoded behind: the prefix alone, or the prefix and primers chosen from the data's contexts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from eval.errors import EvalError
from inputs import Context
from pipelines.primer import ChunkPrefixes, choose_primer, own_primer


@dataclass(frozen=True, slots=True)
class Priming:
    """What primers are chosen from, as for a corpus that is precomputed.

    Attributes:
        corpus: the distinct contexts of the data.
        tokens: that a primer may have, 1 or more.
        nearest: by a context's place in `corpus`, the places of others, the nearest first: each context's chunks get a
            primer of their own from them. None for one primer for all.
        source: what identifies `nearest`, JSON-ready.
    """

    corpus: Sequence[Context]
    tokens: int
    nearest: Sequence[Sequence[int]] | None = None
    source: Mapping[str, Any] = field(default_factory=dict)


def choose_prefixes(
    head: tuple[int, ...], corpus: Sequence[Sequence[tuple[int, ...]]], priming: Priming | None
) -> ChunkPrefixes:
    """Return what each chunk is encoded behind.

    Args:
        head: what precedes a primer, as token ids.
        corpus: token ids of the chunks of each of `priming.corpus`.
        priming: None for no primer.

    Raises:
        EvalError: no primer can be chosen; a run that was to be primed would not be.
    """
    if priming is None:
        return ChunkPrefixes(head)
    if priming.nearest is not None:
        return _own_primers(head, corpus, priming.nearest, priming.tokens)
    chunks = list(chain.from_iterable(corpus))
    primer = choose_primer(chunks, priming.tokens)
    if not primer:
        raise EvalError(
            f"A primer is whole chunks, at most {priming.tokens:,} tokens and an eighth of the data's "
            f"{sum(map(len, set(chunks))):,}: not one fits; give other --primer-tokens or 0, or smaller --chunk-tokens."
        )
    return ChunkPrefixes(head, primer)


def _own_primers(
    head: tuple[int, ...],
    corpus: Sequence[Sequence[tuple[int, ...]]],
    nearest: Sequence[Sequence[int]],
    tokens: int,
) -> ChunkPrefixes:
    own: dict[tuple[int, ...], tuple[int, ...]] = {}
    for chunks, places in zip(corpus, nearest, strict=True):
        near = [chunk for place in places for chunk in corpus[place] if chunk not in chunks]
        if primer := own_primer(near, tokens):
            own.update(dict.fromkeys(chunks, primer))
    if not own:
        raise EvalError(f"No chunk's nearest fits into a primer of {tokens:,} tokens; give more --primer-tokens or 0.")
    return ChunkPrefixes(head, own=own)


def describe_primer(priming: Priming, prefixes: ChunkPrefixes) -> dict[str, Any]:
    """Return what identifies primers: the tokens that each may have, how many there are, SHA-256 of their ids.

    A common one also says its tokens and chunks; primers of their own, where the nearest chunks come from.
    """
    if priming.nearest is not None:
        ids = json.dumps(sorted(prefixes.own.items())).encode()
        mean = sum(map(len, prefixes.own.values())) / len(prefixes.own)
        values: dict[str, Any] = {"own": len(prefixes.own), "tokens": round(mean), "nearest": dict(priming.source)}
    else:
        ids = json.dumps(prefixes.primer_chunks).encode()
        values = {"tokens": len(prefixes.primer), "chunks": len(prefixes.primer_chunks)}
    return {"at_most": priming.tokens, **values, "sha256": hashlib.sha256(ids).hexdigest()}
