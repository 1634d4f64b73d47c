"""`deviation`: CacheBlend's high-KV-deviation rows (arXiv:2405.16444, section 4.2 and 4.3).

All rows are computed up to a check layer; there, the rows whose new KV differs most from the stored KV are kept
and only they go on. With several check layers the choice is narrowed at each ("gradual filtering").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend.errors import BlendError
from cacheblend.selectors.base import Candidates, Evidence, Selector, require_ratio, top_rows


@dataclass(frozen=True)
class DeviationSelector(Selector):
    """Recomputes the `ratio` of reusable rows whose KV deviates most.

    Attributes:
        ratio: share of reusable rows kept after the last check layer.
        check_layers: ascending layers at which rows are dropped; one is the paper's default, more filter
            gradually: the first keeps `widen * ratio`, the last `ratio`, those between fall linearly.
        widen: how much wider the first of several check layers keeps, at least 1.

    Raises:
        BlendError: if a parameter is outside its range.
    """

    ratio: float = 0.15
    check_layers: tuple[int, ...] = (1,)
    widen: float = 1.5
    name: ClassVar[str] = "deviation"
    evidence: ClassVar[Evidence] = Evidence.DEVIATION

    def __post_init__(self) -> None:
        require_ratio(self.ratio)
        if not self.check_layers or list(self.check_layers) != sorted(set(self.check_layers)):
            raise BlendError(f"check_layers are {self.check_layers}; give ascending layer numbers, e.g. (1,).")
        if self.check_layers[0] < 1:
            raise BlendError("check_layers start at 0, where KV cannot deviate; start at 1.")
        if not self.widen >= 1.0:
            raise BlendError(f"widen is {self.widen}; use 1 or more.")

    def choose(self, candidates: Candidates, share: float) -> torch.Tensor:
        """See `Selector.choose`; scores are squared KV deviation."""
        assert candidates.scores is not None
        return top_rows(candidates.scores, candidates.budget(share))

    def shares(self, num_layers: int) -> tuple[tuple[int, float], ...]:
        """See `Selector.shares`.

        Raises:
            BlendError: if a check layer lies beyond the model.
        """
        if self.check_layers[-1] >= num_layers:
            raise BlendError(f"check layer {self.check_layers[-1]} is beyond the model's {num_layers} layers.")
        steps = len(self.check_layers) - 1
        first = min(1.0, self.widen * self.ratio) if steps else self.ratio
        return tuple(
            (layer, first + (self.ratio - first) * i / max(steps, 1)) for i, layer in enumerate(self.check_layers)
        )

    @property
    def share(self) -> float:
        """See `Selector.share`."""
        return self.ratio

    @property
    def spec(self) -> str:
        """See `Selector.spec`."""
        layers = "+".join(map(str, self.check_layers))
        widen = f",widen={self.widen!r}" if len(self.check_layers) > 1 else ""
        return f"{self.name}(ratio={self.ratio!r},check={layers}{widen})"
