"""Selectors by name, as commands, `cache_fuse_metadata` and requests give them."""

from __future__ import annotations

from collections.abc import Callable

from cacheblend.errors import BlendError
from cacheblend.selectors.base import Selector, require_ratio
from cacheblend.selectors.chunk_head import ChunkHeadSelector
from cacheblend.selectors.composed import HeadsThenSelector
from cacheblend.selectors.deviation import DeviationSelector
from cacheblend.selectors.full import FullSelector
from cacheblend.selectors.none import NoneSelector
from cacheblend.selectors.query import QuerySelector

DEFAULT_RATIO = 0.15
DEFAULT_HEAD_TOKENS = 16

_Maker = Callable[[float | None, int | None], Selector]


def _chunk_head(ratio: float | None, head_tokens: int | None) -> ChunkHeadSelector:
    if head_tokens is not None:
        return ChunkHeadSelector(tokens=head_tokens)
    return ChunkHeadSelector(tokens=DEFAULT_HEAD_TOKENS, ratio=ratio)


def _heads(head_tokens: int | None) -> ChunkHeadSelector:
    return ChunkHeadSelector(tokens=DEFAULT_HEAD_TOKENS if head_tokens is None else head_tokens)


def _or_default(ratio: float | None) -> float:
    return DEFAULT_RATIO if ratio is None else ratio


_MAKERS: dict[str, _Maker] = {
    "none": lambda ratio, head: NoneSelector(),
    "chunk_head": _chunk_head,
    "deviation": lambda ratio, head: DeviationSelector(_or_default(ratio)),
    "query": lambda ratio, head: QuerySelector(_or_default(ratio)),
    "chunk_head+query": lambda ratio, head: HeadsThenSelector(_heads(head), QuerySelector(_or_default(ratio))),
    "chunk_head+deviation": lambda ratio, head: HeadsThenSelector(_heads(head), DeviationSelector(_or_default(ratio))),
    "full": lambda ratio, head: FullSelector(),
}

SELECTOR_NAMES = tuple(_MAKERS)
_FIXED = {"none": 0.0, "full": 1.0}


def make_selector(name: str, ratio: float | None = None, head_tokens: int | None = None) -> Selector:
    """Build a selector from its name.

    Args:
        name: one of `SELECTOR_NAMES`.
        ratio: share of reusable rows to recompute, 0 to 1; None is the selector's default (0.15).
        head_tokens: rows per chunk for `chunk_head` and its compositions; None is 16.

    Raises:
        BlendError: for an unknown name, a ratio outside 0 to 1, or a ratio that contradicts `none` or `full`.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise BlendError(f"Selector '{name}' is unknown; use one of {', '.join(SELECTOR_NAMES)}.")
    if ratio is not None and name in _FIXED and ratio != _FIXED[name]:
        raise BlendError(f"Selector '{name}' takes no ratio (got {ratio}); leave it out or use another selector.")
    if ratio is not None:
        require_ratio(ratio)
    return maker(ratio, head_tokens)
