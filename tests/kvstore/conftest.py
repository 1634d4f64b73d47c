from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def python_env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def run_python(python_env):
    """Run code in a process of its own and return what it printed."""

    def run(code: str, *args: object, **env: str) -> str:
        command = [sys.executable, "-c", code, *map(str, args)]
        done = subprocess.run(command, env=python_env | env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A Redis server for the tests of one file."""
    from redis_server import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def server(running):
    """The file's Redis server, empty."""
    with running.client() as client:
        client.flushall()
    return running
