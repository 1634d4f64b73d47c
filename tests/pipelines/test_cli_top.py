"""`cacheblend cache top` against a real HTTP server with Prometheus's own text."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import metrics_server
import pytest
from metrics_server import Metrics, Server, serving
from prometheus_client import generate_latest

from pipelines.cli.http_client import get
from pipelines.cli.server_metrics import COUNTERS, GAUGES, parse_metrics
from pipelines.cli.server_watch import watch

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def busy() -> Metrics:
    """A server that has blended for a while, on two engines."""
    metrics = Metrics()
    for engine in ("0", "1"):
        metrics.set("tier_bytes", "host", value=3 << 30, engine=engine)
        metrics.set("tier_budget_bytes", "host", value=4 << 30, engine=engine)
        metrics.count("hits", amount=45, engine=engine)
    metrics.set("tier_bytes", "gpu", value=1 << 30)
    metrics.set("tier_budget_bytes", "gpu", value=2 << 30)
    metrics.set("transfers_in_flight", value=5)
    metrics.set("pins", value=10)
    metrics.count("misses", "missing", amount=9)
    metrics.count("misses", "checksum")
    metrics.count("requests", "blend", amount=12)
    metrics.count("requests", "full", amount=3)
    metrics.count("fallbacks", "no_token_ids", amount=3)
    metrics.count("bytes_loaded", "host", amount=1000)
    metrics.count("transfers", "host", "ok", amount=8)
    metrics.count("transfers", "gpu", "ok", amount=6)
    metrics.count("transfers", "gpu", "gpu_budget", amount=2)
    metrics.count("transfer_bytes", "gpu", amount=6e9)
    metrics.count("evictions", "gpu", "admission", amount=4)
    metrics.count("evictions", "gpu", "prediction", amount=1)
    metrics.count("evictions", "host", "budget", amount=2)
    return metrics


@pytest.fixture
def server(busy: Metrics) -> Iterator[Server]:
    with serving(busy) as running:
        yield running


def test_the_names_are_those_that_the_connector_exports() -> None:
    pytest.importorskip("vllm")
    from cacheblend.vllm_backend import metrics

    assert set(COUNTERS) <= set(metrics.METRICS)
    assert set(GAUGES) == set(metrics.GAUGES)
    assert {name: metrics.METRICS[name][1] for name in COUNTERS} == metrics_server.COUNTERS
    assert {name: labels for name, (_, labels) in metrics.GAUGES.items()} == metrics_server.GAUGES


def test_what_the_connector_exposes_in_vllms_registry_is_what_is_read() -> None:
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from cacheblend.vllm_backend.metrics import BlendPromMetrics, BlendStats

    registry = CollectorRegistry()

    def into_registry(kind: Any) -> Any:
        return lambda **arguments: kind(**arguments, registry=registry)

    types = {kind: into_registry(kind) for kind in (Counter, Gauge, Histogram)}
    exported = BlendPromMetrics(
        SimpleNamespace(kv_transfer_config=object()), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    stats = BlendStats()
    stats.count("evictions", "gpu:admission", 3)
    stats.count("hits", amount=2)
    stats.gauge("tier_bytes", "gpu", 100)
    for engine in (0, 1):
        exported.observe(stats.data, engine)
    read = parse_metrics(generate_latest(registry).decode(), "here")
    assert read.by("evictions", "reason", tier="gpu") == {"admission": 6}
    assert (read.total("hits"), read.by("tier_bytes", "tier")) == (4, {"gpu": 200})


def test_once_as_json_tells_all_summed_over_engines(cli: Any, server: Server) -> None:
    result = cli("cacheblend", "cache", "top", "--url", f"{server.url}/metrics", "--once", "--json")
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    told = json.loads(line)
    assert told["url"] == f"{server.url}/metrics"
    assert (told["error"], told["interval"]) == (None, None)
    assert told["now"] == {
        "tiers": {
            "gpu": {"bytes": 1 << 30, "budget_bytes": 2 << 30},
            "host": {"bytes": 6 << 30, "budget_bytes": 8 << 30},
        },
        "transfers_in_flight": 5,
        "pins": 10,
    }
    assert told["total"] == {
        "hits": 90,
        "hit_rate": 0.9,
        "misses": {"missing": 9, "checksum": 1},
        "requests": {"blend": 12, "full": 3},
        "fallbacks": {"no_token_ids": 3},
        "bytes_loaded": {"host": 1000},
        "transfers": {
            "gpu": {"outcomes": {"ok": 6, "gpu_budget": 2}, "bytes": 6_000_000_000},
            "host": {"outcomes": {"ok": 8}, "bytes": 0},
        },
        "evictions": {"gpu": {"admission": 4, "prediction": 1}, "host": {"budget": 2}},
    }


def test_once_without_a_terminal_prints_tiers_hit_rate_and_reasons(cli: Any, server: Server) -> None:
    result = cli("cacheblend", "cache", "top", "--url", server.url, "--once")
    assert result.exit_code == 0, result.stderr
    assert "\x1b" not in result.stdout
    words = " ".join(result.stdout.replace("│", " ").split())
    for part in (
        f"{server.url}/metrics",
        "gpu 1.0 GiB 2.0 GiB - - 6 2 gpu_budget - 4 admission, 1 prediction",
        "host 6.0 GiB 8.0 GiB - - 8 - - 2 budget",
        "transfers in flight 5, pins 10",
        "since start 90.0% 90 9 missing, 1 checksum 12 blend, 3 full 3 no_token_ids",
    ):
        assert part in words


def test_a_server_that_has_counted_nothing_yet_is_shown_empty(cli: Any) -> None:
    with serving(Metrics()) as idle:
        result = cli("cacheblend", "cache", "top", "--url", idle.url, "--once", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["now"] == {"tiers": {}, "transfers_in_flight": 0, "pins": 0}
    assert (told["total"]["hits"], told["total"]["hit_rate"], told["total"]["evictions"]) == (0, None, {})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answering(status: int, kind: str, content: bytes) -> Server:
    return Server(lambda *request: (status, kind, content))


def one_sentence(result: Any) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return str(line)


def test_a_server_that_is_not_there_is_one_sentence(cli: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}/metrics"
    assert f"{url} cannot be reached" in one_sentence(cli("cacheblend", "cache", "top", "--url", url, "--once"))


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x/metrics", "http://", "file:///etc/hostname", "http://a:b", "http://[x"]
)
def test_an_address_that_is_none_is_one_sentence(cli: Any, url: str) -> None:
    assert f"--url '{url}' is no address" in one_sentence(cli("cacheblend", "cache", "top", "--url", url, "--once"))


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, b"# TYPE vllm:x counter\nvllm:x_total 1.0\n", "no metrics of cacheblend"),
        (200, b"<html>hello</html>", "no Prometheus text"),
        (200, b"\xff\xfe\x00", "no text"),
        (404, b'{"detail":"Not Found"}', "answers 404"),
    ],
)
def test_an_answer_that_tells_nothing_of_chunks_is_one_sentence(
    cli: Any, status: int, content: bytes, said: str
) -> None:
    with answering(status, "text/plain", content) as other:
        assert said in one_sentence(cli("cacheblend", "cache", "top", "--url", f"{other.url}/metrics", "--once"))


def test_rates_are_of_the_seconds_between_two_looks(busy: Metrics) -> None:
    now = [0.0]

    def read() -> Any:
        return parse_metrics(generate_latest(busy.registry).decode(), "here")

    looks = watch(read, 2.0, lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    assert next(looks).interval is None
    busy.count("transfers", "gpu", "ok", amount=4)
    busy.count("transfer_bytes", "gpu", amount=1000)
    busy.count("hits", amount=3)
    busy.count("misses", "missing", amount=1)
    busy.set("pins", value=0)
    told = next(looks).account()
    assert told["now"]["pins"] == 0
    assert told["interval"]["seconds"] == 2.0
    assert told["interval"]["transfers"]["gpu"] == {"outcomes": {"ok": 4}, "bytes": 1000}
    assert (told["interval"]["hits"], told["interval"]["hit_rate"]) == (3, 0.75)
    assert told["interval"]["misses"] == {"missing": 1}
    assert told["interval"]["evictions"] == {"gpu": {}, "host": {}}
    assert told["total"]["hits"] == 93


def test_a_server_that_goes_away_is_said_and_one_that_comes_back_counts_from_nothing(busy: Metrics) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    looks = watch(lambda: parse_metrics(get(url, 5.0), url), 0.01)
    with serving(busy, port):
        assert next(looks).trouble is None
    gone = next(looks)
    assert f"{url} cannot be reached" in str(gone.trouble)
    assert (gone.metrics.total("hits"), gone.interval) == (90, None)
    anew = Metrics()
    anew.count("hits", amount=2)
    with serving(anew, port):
        back = next(looks)
    assert back.trouble is None
    assert back.interval is not None
    assert (back.interval.total("hits"), back.metrics.total("hits")) == (2, 2)
    assert min(back.interval.counters.values()) >= 0


def start(*options: str, stdout: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pipelines.cli.main", "cache", "top", "--interval", "0.1", *options]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, cwd=REPOSITORY, env=environment)


def ends_well(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (0, b"")


def test_it_goes_on_a_line_an_interval_until_it_is_interrupted(busy: Metrics) -> None:
    running = serving(busy)
    process = start("--url", running.url, "--json", stdout=subprocess.PIPE)
    assert process.stdout is not None
    lines = (json.loads(line) for line in process.stdout)
    first, second = islice(lines, 2)
    assert (first["interval"], first["error"], second["error"]) == (None, None, None)
    assert second["interval"]["seconds"] > 0
    running.close()
    assert any(told["error"] for told in islice(lines, 100))
    ends_well(process)


def test_in_a_terminal_the_view_is_drawn_over_and_says_when_the_server_goes(busy: Metrics) -> None:
    running = serving(busy)
    terminal, inside = pty.openpty()
    process = start("--url", running.url, stdout=inside)
    os.close(inside)
    seen = read_until(terminal, b"1 prediction", process)
    running.close()
    seen += read_until(terminal, b"no answer", process)
    assert b"\x1b[1A" in seen
    ends_well(process)
    os.close(terminal)


def read_until(terminal: int, mark: bytes, process: subprocess.Popen[bytes]) -> bytes:
    seen, end = b"", time.monotonic() + 60
    while mark not in seen:
        assert time.monotonic() < end, seen
        assert process.poll() is None, seen
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 1 << 16)
    return seen
