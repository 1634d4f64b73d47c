"""How close to full prefill an answer shall be: three names for the share of reused rows that is recomputed.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from enum import StrEnum


class Fidelity(StrEnum):
    """What a user asks for who knows no ratios."""

    FAST = "fast"
    BALANCED = "balanced"
    FAITHFUL = "faithful"

    @property
    def ratio(self) -> float:
        """Share of reusable rows to recompute, for the default selector; the README's table says what each costs."""
        return _RATIOS[self]


_RATIOS = {Fidelity.FAST: 0.05, Fidelity.BALANCED: 0.15, Fidelity.FAITHFUL: 0.30}
