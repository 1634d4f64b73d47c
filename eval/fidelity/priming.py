"""What chunks are encoded behind: the prefix alone, or the prefix and a primer chosen from the data's contexts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.errors import EvalError
from inputs import Context
from pipelines.primer import ChunkPrefixes, choose_primer


@dataclass(frozen=True, slots=True)
class Priming:
    """What a primer is chosen from, for all questions alike, as for a corpus that is precomputed.

    Attributes:
        corpus: the distinct contexts of the data.
        tokens: that the primer may have, 1 or more.
    """

    corpus: Sequence[Context]
    tokens: int


def choose_prefixes(head: tuple[int, ...], corpus: Sequence[tuple[int, ...]], priming: Priming | None) -> ChunkPrefixes:
    """Return what each chunk is encoded behind.

    Args:
        head: what precedes the primer, as token ids.
        corpus: token ids of all chunks of `priming.corpus`.
        priming: None for no primer.

    Raises:
        EvalError: no primer can be chosen; a run that was to be primed would not be.
    """
    if priming is None:
        return ChunkPrefixes(head, ())
    primer = choose_primer(corpus, priming.tokens)
    if not primer:
        raise EvalError(
            f"A primer is whole chunks, at most {priming.tokens:,} tokens and an eighth of the data's "
            f"{sum(map(len, set(corpus))):,}: not one fits; give other --primer-tokens or 0, or smaller --chunk-tokens."
        )
    return ChunkPrefixes(head, primer)


def describe_primer(priming: Priming, prefixes: ChunkPrefixes) -> dict[str, Any]:
    """Return what identifies a primer: tokens asked for at most, its tokens and chunks, SHA-256 of its token ids."""
    ids = json.dumps(prefixes.primer_chunks).encode()
    return {
        "at_most": priming.tokens,
        "tokens": len(prefixes.primer),
        "chunks": len(prefixes.primer_chunks),
        "sha256": hashlib.sha256(ids).hexdigest(),
    }
