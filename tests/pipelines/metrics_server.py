"""A real HTTP server with Prometheus's own exposition of the metrics that the connector makes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

COUNTERS = {
    "requests": ("mode",),
    "hits": (),
    "misses": ("reason",),
    "fallbacks": ("reason",),
    "bytes_loaded": ("tier",),
    "transfers": ("tier", "outcome"),
    "transfer_bytes": ("tier",),
    "evictions": ("tier", "reason"),
}
GAUGES = {"tier_bytes": ("tier",), "tier_budget_bytes": ("tier",), "transfers_in_flight": (), "pins": ()}
OWN_LABELS = ("model_name", "engine")
"""vLLM's."""


class Metrics:
    """A registry like that of a server with the connector."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = {name: self._made(Counter, name, labels) for name, labels in COUNTERS.items()}
        self._metrics: dict[str, Any] = {**made, **{n: self._made(Gauge, n, labels) for n, labels in GAUGES.items()}}
        Counter("vllm:generation_tokens", "vLLM's own.", registry=self.registry).inc(7)

    def count(self, name: str, *labels: str, amount: float = 1, engine: str = "0") -> None:
        """Add to a counter."""
        self._metrics[name].labels("model", engine, *labels).inc(amount)

    def set(self, name: str, *labels: str, value: float, engine: str = "0") -> None:
        """Set a gauge."""
        self._metrics[name].labels("model", engine, *labels).set(value)

    def _made(self, kind: Any, name: str, labels: tuple[str, ...]) -> Any:
        return kind(f"vllm:cacheblend_{name}", "...", [*OWN_LABELS, *labels], registry=self.registry)


class Server:
    """Answers each request by `answer(method, path, headers, body) -> (status, content type, body)`."""

    def __init__(self, answer: Callable[[str, str, Any, bytes], tuple[int, str, bytes]], port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply("GET", b"")

            def do_POST(self) -> None:
                self._reply("POST", self.rfile.read(int(self.headers["content-length"])))

            def log_message(self, *args: object) -> None:
                """Say nothing."""

            def _reply(self, method: str, body: bytes) -> None:
                status, kind, content = answer(method, self.path, self.headers, body)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop listening; the port answers nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serving(metrics: Metrics, port: int = 0) -> Server:
    """A server whose /metrics shows these, and that has nothing else."""

    def answer(method: str, path: str, headers: Any, body: bytes) -> tuple[int, str, bytes]:
        if path != "/metrics":
            return 404, "application/json", b'{"detail":"Not Found"}'
        return 200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(metrics.registry)

    return Server(answer, port)
