"""`python -m eval.serve_check`, whole, against vLLM's own server."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)


def test_a_served_model_blends_refuses_wrong_plans_and_answers_plain_requests_as_without_the_connector() -> None:
    repository = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-m", "eval.serve_check"], env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vllm:cacheblend_hits_total" in done.stdout
