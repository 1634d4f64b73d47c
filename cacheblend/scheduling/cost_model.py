"""`CostModel`: what it costs to bring KV and what it costs to compute it, as measured at start. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cacheblend.errors import BlendError
from kvstore.tiers import Tier


@dataclass(frozen=True)
class CostModel:
    """Measured rates, from which seconds follow.

    Attributes:
        bytes_per_s: rate at which KV comes from a tier to where a blend can use it. A tier that is not named costs
            nothing.
        latency_s: seconds before the first byte comes from a tier; 0 where it is not named.
        prefill_rows_per_s: rows a second that a prefill computes behind no context.
        prefill_rows_squared_s: seconds that each pair of a row and a row it attends to takes on top; may be 0.

    Raises:
        BlendError: a rate that is not above 0, or a time that is negative or not finite.
    """

    bytes_per_s: Mapping[Tier, float]
    latency_s: Mapping[Tier, float]
    prefill_rows_per_s: float
    prefill_rows_squared_s: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in (*self.bytes_per_s.items(), ("prefill", self.prefill_rows_per_s)):
            if not rate > 0:
                raise BlendError(f"The measured rate of {name} is {rate}; give one above 0.")
        for name, seconds in (*self.latency_s.items(), ("attention", self.prefill_rows_squared_s)):
            if not 0 <= seconds < math.inf:
                raise BlendError(f"The measured time of {name} is {seconds} s; give 0 or more.")

    def reload_seconds(self, tier: Tier, nbytes: int) -> float:
        """Seconds until `nbytes` have come from one tier."""
        rate = self.bytes_per_s.get(tier)
        return 0.0 if rate is None else self.latency_s.get(tier, 0.0) + nbytes / rate

    def load_seconds(self, nbytes_by_tier: Mapping[Tier, int]) -> float:
        """Seconds until these bytes have come from their tiers, one tier after another."""
        return sum(self.reload_seconds(tier, nbytes) for tier, nbytes in nbytes_by_tier.items() if nbytes)

    def prefill_seconds(self, rows: int, context: int) -> float:
        """Seconds to compute `rows` consecutive rows behind `context` rows."""
        return rows / self.prefill_rows_per_s + self.prefill_rows_squared_s * rows * (context + rows / 2)

    def recompute_seconds(self, rows: int, length: int) -> float:
        """Seconds to compute `rows` rows spread over a prompt of `length` rows; all of them are a prefill."""
        return rows / self.prefill_rows_per_s + self.prefill_rows_squared_s * rows * length / 2
