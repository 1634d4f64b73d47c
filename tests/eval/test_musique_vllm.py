"""`python -m eval.musique --engine vllm` from end to end, with the bundled model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

ARMS = "full,full-again,prefix-cached,reuse,query:0.15"


def call(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    common = ["--engine", "vllm", "--questions", "2", "--arms", ARMS, "--max-tokens", "3", "--out", str(out)]
    return subprocess.run(
        [sys.executable, "-m", "eval.musique", *common, *arguments],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_shards_of_a_run_on_vllm_come_to_one_report_behind_its_gates(tmp_path: Path) -> None:
    first = call(tmp_path, "--shard", "1/2")
    assert first.returncode == 0, first.stderr
    assert "1 of 2 questions are finished" in first.stderr
    before = records(tmp_path)
    second = call(tmp_path, "--shard", "2/2", "--apart", "2")
    assert second.returncode == 0, second.stderr
    assert records(tmp_path)[: len(before)] == before
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads((tmp_path / "from-2" / "result.json").read_text())["questions"] == 1
    assert (result["questions"], result["settings"]["engine"]) == (2, "vllm")
    assert result["gates"]["questions"] == 2
    assert result["gates"]["recompute_all"] <= 1e-5
    rows = {row["name"]: row for row in result["rows"]}
    for name in ("full", "full-again", "prefix-cached"):
        assert rows[name]["agreement"]["mean"] == 1.0
        assert rows[name]["kl_answer"]["high"] < 1e-5
    assert rows["reuse"]["recomputed_tokens"] == 0
    assert 0 < rows["query:0.15"]["kl_answer"]["mean"] < rows["reuse"]["kl_answer"]["mean"]
    assert rows["query:0.15"]["recomputed_ratio"] == pytest.approx(0.15, abs=0.01)
    assert all(row["fallbacks"] == {} for row in rows.values())


@pytest.mark.slow
def test_chunks_behind_a_primer_come_to_what_they_come_to_on_the_reference_engine(tmp_path: Path) -> None:
    primed = ["--primer-tokens", "500", "--questions", "1", "--arms", "full,reuse,query:0.15"]
    rows: dict[str, dict[str, Any]] = {}
    primers = []
    for engine in ("vllm", "reference"):
        done = call(tmp_path / engine, *primed, "--engine", engine)
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / engine / "result.json").read_text())
        rows[engine] = {row["name"]: row for row in result["rows"]}
        primers.append(result["settings"]["primer"])
    assert primers[0] == primers[1]
    assert primers[0]["chunks"] > 1
    for arm in ("reuse", "query:0.15"):
        on_vllm, on_reference = rows["vllm"][arm], rows["reference"][arm]
        assert on_vllm["kl_answer"]["mean"] == pytest.approx(on_reference["kl_answer"]["mean"], rel=1e-2)
        assert on_vllm["fallbacks"] == on_reference["fallbacks"] == {}
