"""The engine's gates on a GPU: each engine in a process of its own, all results in one file.

    python3 tests/gpu/run_gates.py --out FILE.json [--engines llama,qwen2-yarn] [--commit HASH]

fp32 on tiny random models under TRITON_ATTN with IEEE products, as `tests/vllm_backend/engine_configs.py` sets up where
there is a GPU. Exits with 1 if any test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch
import vllm

FILES = (
    "test_engine_gates.py",
    "test_engine_cases.py",
    "test_engine_drift.py",
    "test_engine_failures.py",
    "test_engine_fairness.py",
)
ENGINES = (
    "llama",
    "llama-tiny-pool",
    "llama-llama3",
    "qwen2-yarn",
    "qwen3-linear",
    "mistral-default",
    "llama-compiled",
    "llama-graphs",
    "qwen3-graphs",
    "llama-gpu-pool",
    "llama-no-prefix-caching",
    "llama-process",
    "llama-ngram",
    "llama-runs",
)
ROOT = Path(__file__).parents[2]


def run(engine: str, seconds: int) -> dict[str, Any]:
    """Run every test of one engine."""
    report = Path(f"/tmp/gates-{engine}.xml")
    report.unlink(missing_ok=True)
    tests = [str(ROOT / "tests" / "vllm_backend" / name) for name in FILES]
    select = ["-m", "matrix or not matrix"]
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--timeout=100"]
    started = time.perf_counter()
    with open(f"/tmp/gates-{engine}.log", "w") as log:
        command = [sys.executable, "-m", "pytest", *options, *select, *tests]
        environment = {**os.environ, "CACHEBLEND_TEST_ENGINES": engine}
        subprocess.run(command, cwd=ROOT, timeout=seconds, check=False, stdout=log, stderr=log, env=environment)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    failures = [
        {"test": case.get("name"), "message": problem.get("message", "")[:400]}
        for case in suite.iter("testcase")
        for problem in [*case.findall("failure"), *case.findall("error")]
    ]
    count = int(suite.get("tests", 0))
    passed = count - len(failures) - int(suite.get("skipped", 0))
    return {"passed": passed, "failed": failures, "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--seconds", type=int, default=150, help="for one engine")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    result: dict[str, Any] = {
        "what": "gates of vLLM with the connector, fp32, tiny random models",
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "commit": args.commit,
        "engines": {},
    }
    for engine in args.engines.split(","):
        try:
            result["engines"][engine] = run(engine, args.seconds)
        except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError) as error:
            result["engines"][engine] = {"passed": 0, "failed": [{"test": "all", "message": str(error)[:400]}]}
        print(engine, json.dumps(result["engines"][engine])[:600], flush=True)
        args.out.write_text(json.dumps(result, indent=1))
    if any(outcome["failed"] or not outcome["passed"] for outcome in result["engines"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
