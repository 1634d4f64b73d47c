"""What a closed loop of requests came to: a finished request is replaced at once, so many are always in flight."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Served:
    """One request's times, in seconds of one clock.

    Attributes:
        submitted: when it was handed to the engine.
        first: when its first token was there.
        last: when its last token was there.
        tokens: how many it got.
    """

    submitted: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token, queueing included."""
        return (self.first - self.submitted) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Milliseconds a token after the first."""
        return (self.last - self.first) * 1e3 / (self.tokens - 1)


@dataclass(slots=True)
class Block:
    """A stretch of one arm on an engine that was idle before and is idle again after.

    Attributes:
        served: its requests, all finished.
    """

    served: list[Served] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first submission to the last token."""
        return max(one.last for one in self.served) - min(one.submitted for one in self.served)

    @property
    def requests_per_s(self) -> float:
        """Finished requests by the block's seconds, its beginning and its end included."""
        return len(self.served) / self.seconds


def loop_values(blocks: Sequence[Block]) -> dict[str, Any]:
    """What the blocks of one arm came to, JSON-ready; times of all their requests together."""
    served = [one for block in blocks for one in block.served]
    ttft = [one.ttft_ms for one in served]
    return {
        "requests_per_s": len(served) / sum(block.seconds for block in blocks),
        "requests": len(served),
        "blocks": [{"seconds": block.seconds, "requests_per_s": block.requests_per_s} for block in blocks],
        "tpot_ms_mean": statistics.fmean(one.tpot_ms for one in served),
        "ttft_ms_p50": float(np.percentile(ttft, 50)),
        "ttft_ms_p99": float(np.percentile(ttft, 99)),
    }
