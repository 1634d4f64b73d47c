"""`cacheblend cache top`: what a running server does with its chunks, live."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from typer import Option

from pipelines.cli.failures import ends_with_a_sentence
from pipelines.cli.http_client import checked, get
from pipelines.cli.options import AsJson
from pipelines.cli.output import PIPED_WIDTH, print_json
from pipelines.cli.server_metrics import ServerMetrics, parse_metrics
from pipelines.cli.server_watch import Look, watch
from pipelines.cli.top_view import view

TIMEOUT_S = 10.0


@ends_with_a_sentence
def top(
    url: Annotated[str, Option(help="The server's /metrics.")] = "http://localhost:8000/metrics",
    interval: Annotated[float, Option(min=0.1, help="Seconds from one look to the next.")] = 1.0,
    once: Annotated[bool, Option("--once", help="Look once, which tells no rates, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a running server's chunks until Ctrl-C.

    Tiers and budgets, what is found, what moves, what is evicted and why. Without a terminal it prints one block an
    interval, with --json one line.

    \b
    Example:
      cacheblend cache top --url http://localhost:8000/metrics
    """
    address = checked(url)
    if urlsplit(address).path in ("", "/"):
        address = f"{address.rstrip('/')}/metrics"
    looks = islice(watch(lambda: _read(address), interval), 1 if once else None)
    try:
        if as_json:
            _print_lines(looks, address)
        else:
            _show(looks, address)
    except KeyboardInterrupt:
        # The way to end it, not an interruption.
        return


def _read(url: str) -> ServerMetrics:
    return parse_metrics(get(url, TIMEOUT_S), url)


def _print_lines(looks: Iterable[Look], url: str) -> None:
    for look in looks:
        print_json({"url": url, "time_utc": datetime.now(UTC).isoformat(timespec="milliseconds"), **look.account()})
        sys.stdout.flush()


def _show(looks: Iterable[Look], url: str) -> None:
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        for look in looks:
            console.print(view(look, url))
            sys.stdout.flush()
        return
    with Live(console=console, auto_refresh=False) as live:
        for look in looks:
            live.update(view(look, url), refresh=True)
