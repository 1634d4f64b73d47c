"""Looking at a server again and again, and what happened in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.cli.server_metrics import ServerMetrics
from pipelines.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a server.

    Attributes:
        metrics: what it told; the last that it told when it could not be asked.
        seconds: since the look before that told something; None at the first one, and when it could not be asked.
        interval: what was counted in these seconds; None as `seconds`.
        trouble: why it could not be asked; None when it could.
    """

    metrics: ServerMetrics
    seconds: float | None = None
    interval: ServerMetrics | None = None
    trouble: str | None = None

    def account(self) -> dict[str, Any]:
        """A JSON-ready form."""
        budgets = self.metrics.by("tier_budget_bytes", "tier")
        return {
            "error": self.trouble,
            "now": {
                "tiers": {
                    tier: {"bytes": int(nbytes), "budget_bytes": int(budgets.get(tier, 0))}
                    for tier, nbytes in self.metrics.by("tier_bytes", "tier").items()
                },
                "transfers_in_flight": int(self.metrics.total("transfers_in_flight")),
                "pins": int(self.metrics.total("pins")),
            },
            "total": _counts(self.metrics),
            "interval": None if self.interval is None else {"seconds": self.seconds, **_counts(self.interval)},
        }


def hit_rate(counted: ServerMetrics) -> float | None:
    """Of the chunks asked for, the share whose stored KV was used; None if none was asked for."""
    hits, misses = counted.total("hits"), counted.total("misses")
    return hits / (hits + misses) if hits + misses else None


def watch(
    read: Callable[[], ServerMetrics],
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[Look]:
    """Look at once, then every `interval_s` seconds, for ever.

    Args:
        read: asks the server.
        interval_s: seconds from one look to the next.
        clock: seconds, never going back.
        pause: waits for so many seconds.

    Raises:
        PipelineError: the first look fails. Later ones that fail say so.
    """
    metrics, at = read(), clock()
    yield Look(metrics)
    due = at
    while True:
        # Never in a hurry to catch up.
        due = max(due + interval_s, clock())
        pause(max(due - clock(), 0.0))
        try:
            newer = read()
        except PipelineError as error:
            yield Look(metrics, trouble=str(error))
            continue
        now = clock()
        yield Look(newer, now - at, newer.since(metrics))
        metrics, at = newer, now


def _counts(counted: ServerMetrics) -> dict[str, Any]:
    tiers = sorted({*counted.by("transfers", "tier"), *counted.by("transfer_bytes", "tier")})
    nbytes = counted.by("transfer_bytes", "tier")
    return {
        "hits": int(counted.total("hits")),
        "hit_rate": hit_rate(counted),
        "misses": _whole(counted.by("misses", "reason")),
        "requests": _whole(counted.by("requests", "mode")),
        "fallbacks": _whole(counted.by("fallbacks", "reason")),
        "bytes_loaded": _whole(counted.by("bytes_loaded", "tier")),
        "transfers": {
            tier: {
                "outcomes": _whole(counted.by("transfers", "outcome", tier=tier)),
                "bytes": int(nbytes.get(tier, 0)),
            }
            for tier in tiers
        },
        "evictions": {
            tier: _whole(counted.by("evictions", "reason", tier=tier)) for tier in counted.by("evictions", "tier")
        },
    }


def _whole(values: dict[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in values.items() if value}
