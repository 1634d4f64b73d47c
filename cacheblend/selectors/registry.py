"""Selectors by name, as commands, `cache_fuse_metadata` and requests give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cacheblend.errors import BlendError
from cacheblend.selectors.base import Selector, require_ratio
from cacheblend.selectors.chunk_head import ChunkHeadSelector
from cacheblend.selectors.composed import HeadsThenSelector
from cacheblend.selectors.deviation import DeviationSelector
from cacheblend.selectors.full import FullSelector
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.selectors.none import NoneSelector
from cacheblend.selectors.query import QuerySelector

DEFAULT_RATIO = 0.15
DEFAULT_HEAD_TOKENS = 16


@dataclass(frozen=True)
class _Wanted:
    """What a caller says beside the name; None is the default."""

    ratio: float | None
    head_tokens: int | None
    check_layers: tuple[int, ...] | None

    @property
    def share(self) -> float:
        return DEFAULT_RATIO if self.ratio is None else self.ratio

    def chunk_head(self) -> ChunkHeadSelector:
        if self.head_tokens is not None:
            return ChunkHeadSelector(tokens=self.head_tokens)
        return ChunkHeadSelector(tokens=DEFAULT_HEAD_TOKENS, ratio=self.ratio)

    def heads(self) -> ChunkHeadSelector:
        return ChunkHeadSelector(tokens=DEFAULT_HEAD_TOKENS if self.head_tokens is None else self.head_tokens)

    def query(self) -> QuerySelector:
        return QuerySelector(self.share)

    def deviation(self) -> DeviationSelector:
        if self.check_layers is None:
            return DeviationSelector(self.share)
        return DeviationSelector(self.share, self.check_layers)


_MAKERS: dict[str, Callable[[_Wanted], Selector]] = {
    "none": lambda wanted: NoneSelector(),
    "chunk_head": _Wanted.chunk_head,
    "deviation": _Wanted.deviation,
    "query": _Wanted.query,
    "chunk_head+query": lambda wanted: HeadsThenSelector(wanted.heads(), wanted.query()),
    "chunk_head+deviation": lambda wanted: HeadsThenSelector(wanted.heads(), wanted.deviation()),
    "full": lambda wanted: FullSelector(),
}

SELECTOR_NAMES = tuple(_MAKERS)
_FIXED = {"none": 0.0, "full": 1.0}


def make_selector(
    name: str,
    ratio: float | None = None,
    head_tokens: int | None = None,
    check_layers: tuple[int, ...] | None = None,
) -> Selector:
    """Build a selector from its name.

    Args:
        name: one of `SELECTOR_NAMES`.
        ratio: share of reusable rows to recompute, 0 to 1; None is the selector's default (0.15).
        head_tokens: rows per chunk for `chunk_head` and its compositions; None is 16.
        check_layers: layers at which `deviation` and its composition drop rows; None is (1,).

    Raises:
        BlendError: for an unknown name, a ratio outside 0 to 1 or one that contradicts `none` or `full`, or head tokens
            for a selector without heads.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise BlendError(f"Selector '{name}' is unknown; use one of {', '.join(SELECTOR_NAMES)}.")
    if ratio is not None and name in _FIXED and ratio != _FIXED[name]:
        raise BlendError(f"Selector '{name}' takes no ratio (got {ratio}); leave it out or use another selector.")
    if ratio is not None:
        require_ratio(ratio)
    if head_tokens is not None and "chunk_head" not in name:
        raise BlendError(
            f"Selector '{name}' takes no head_tokens (got {head_tokens}); leave it out or use chunk_head, "
            "chunk_head+query or chunk_head+deviation."
        )
    return maker(_Wanted(ratio, head_tokens, check_layers))


def selector_params(selector: Selector) -> dict[str, Any]:
    """What `make_selector` makes an equal selector of: the form in which a selector travels to another process.

    Returns:
        Arguments of `make_selector`; or `rows` alone, for rows that are given.

    Raises:
        BlendError: for a selector with a parameter that `make_selector` does not take.
    """
    if isinstance(selector, GivenRowsSelector):
        if len(selector.layers) == 1:
            return {"rows": selector.layers[0][1]}
    elif selector.name in _MAKERS:
        params = {"name": selector.name, **_own_params(selector)}
        if make_selector(**params) == selector:
            return params
    raise BlendError(
        f"Selector {selector.spec} cannot travel to another process: not all of it can be said by name, ratio, "
        "head_tokens and check_layers; make it with make_selector."
    )


def _own_params(selector: Selector) -> dict[str, Any]:
    if isinstance(selector, HeadsThenSelector):
        return {**_own_params(selector.heads), **_own_params(selector.scored)}
    if isinstance(selector, ChunkHeadSelector):
        return {"head_tokens": selector.tokens} if selector.ratio is None else {"ratio": selector.ratio}
    if isinstance(selector, DeviationSelector):
        return {"ratio": selector.ratio, "check_layers": selector.check_layers}
    return {"ratio": selector.share} if isinstance(selector, QuerySelector) else {}
