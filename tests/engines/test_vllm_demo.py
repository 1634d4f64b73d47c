"""A command on vLLM as a user runs it: the bundled model, and an engine in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400


def environment(tmp_path: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {**quiet, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}


def processes_naming(word: str) -> list[str]:
    import psutil

    found = []
    for process in psutil.process_iter(["environ", "name"]):
        if word in str(process.info["environ"]):
            found.append(f"{process.pid} {process.info['name']} {process.status()}")
    return found


def test_the_demo_runs_on_vllm_prints_nothing_but_json_and_leaves_no_process(tmp_path):
    """Every process of it inherits this environment, which names a folder of this test."""
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli.main", "demo", "--json",
         "--cache-dir", str(tmp_path / "kv"), "--index-dir", str(tmp_path / "indexes")],
        cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    account = json.loads(done.stdout)
    assert account["engine"] == "vllm"
    assert account["precompute"]["computed"] == account["precompute"]["distinct"] > 0
    full, reuse, blend = account["arms"]
    assert full["reused_tokens"] == reuse["recomputed_tokens"] == 0
    assert reuse["reused_tokens"] == blend["reused_tokens"] > blend["recomputed_tokens"] > 0
    metas = [answer["meta"] for arm in (reuse, blend) for answer in arm["answers"]]
    assert all(meta["engine"] == "vllm" and meta["mode"] == "blend" and not meta["fallback_reasons"] for meta in metas)
    assert "Marta Quillen" in full["answers"][1]["text"]
    assert "Traceback" not in done.stderr
    assert processes_naming(str(tmp_path)) == []
