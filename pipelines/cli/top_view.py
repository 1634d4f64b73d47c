"""How `cacheblend cache top` shows a server."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table

from pipelines.cli.server_metrics import ServerMetrics
from pipelines.cli.server_watch import Look, hit_rate
from pipelines.cli.units import size_text

TIERS = ("gpu", "host", "disk", "remote")
NOTHING = "-"


def view(look: Look, url: str) -> RenderableType:
    """One block: the tiers, then what requests found, each for the last interval and since the server's start."""
    head = f"{url}  {time.strftime('%H:%M:%S')}"
    if look.seconds is not None:
        head += f"  last {look.seconds:.1f} s"
    if look.trouble is not None:
        head += f"\nno answer, last known below: {look.trouble}"
    metrics = look.metrics
    flying = f"transfers in flight {metrics.total('transfers_in_flight'):,.0f}, pins {metrics.total('pins'):,.0f}"
    return Group(head, _tiers_table(look), flying, _requests_table(look))


def _tiers_table(look: Look) -> Table:
    table = Table("tier")
    for name in ("used", "budget", "chunks/s", "GB/s", "moved here", "not moved", "evicted", "evicted in all"):
        table.add_column(name, justify="left" if name.startswith(("not", "evicted")) else "right")
    metrics = look.metrics
    for tier in _tiers_of(metrics):
        outcomes = metrics.by("transfers", "outcome", tier=tier)
        table.add_row(
            tier,
            _size(metrics.by("tier_bytes", "tier").get(tier)),
            _size(metrics.by("tier_budget_bytes", "tier").get(tier)),
            _a_second(look, _arrived(look.interval, tier)),
            _a_second(look, _bytes_moved(look.interval, tier) / 1e9),
            f"{outcomes.pop('ok', 0.0):,.0f}",
            _listed(outcomes),
            NOTHING if look.interval is None else _listed(look.interval.by("evictions", "reason", tier=tier)),
            _listed(metrics.by("evictions", "reason", tier=tier)),
        )
    return table


def _requests_table(look: Look) -> Table:
    table = Table("", "chunks found", "hits", "misses", "requests", "prefilled whole, why")
    for name, counted in (("last interval", look.interval), ("since start", look.metrics)):
        if counted is None:
            table.add_row(name, *[NOTHING] * 5)
            continue
        rate = hit_rate(counted)
        table.add_row(
            name,
            NOTHING if rate is None else f"{rate:.1%}",
            f"{counted.total('hits'):,.0f}",
            _listed(counted.by("misses", "reason")),
            _listed(counted.by("requests", "mode")),
            _listed(counted.by("fallbacks", "reason")),
        )
    return table


def _tiers_of(metrics: ServerMetrics) -> list[str]:
    named = {*metrics.by("tier_bytes", "tier"), *metrics.by("transfers", "tier"), *metrics.by("evictions", "tier")}
    return sorted(named, key=lambda tier: (TIERS.index(tier) if tier in TIERS else len(TIERS), tier))


def _arrived(counted: ServerMetrics | None, tier: str) -> float:
    return 0.0 if counted is None else counted.by("transfers", "outcome", tier=tier).get("ok", 0.0)


def _bytes_moved(counted: ServerMetrics | None, tier: str) -> float:
    return 0.0 if counted is None else counted.by("transfer_bytes", "tier").get(tier, 0.0)


def _a_second(look: Look, amount: float) -> str:
    return f"{amount / look.seconds:,.2f}" if look.seconds else NOTHING


def _size(nbytes: float | None) -> str:
    return NOTHING if nbytes is None else size_text(nbytes)


def _listed(counts: dict[str, float]) -> str:
    """What was counted, the most frequent first: "12 admission, 3 prediction"."""
    named: Iterable[tuple[str, float]] = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,.0f} {name}" for name, count in named if count) or NOTHING
