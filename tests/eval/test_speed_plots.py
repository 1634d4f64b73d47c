"""The plots of speed come from result files by one command; what lacks is one sentence."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from eval.report.dial_plots import plot_against_recomputed, plot_against_ttft
from eval.report.speed_plots import plot_parts, plot_ttft_by_length
from eval.speed.results import FidelityRun, read_fidelity, read_shares, read_ttft
from eval.speed_plots import app

ARMS: dict[str, dict[str, Any]] = {
    "reuse": {"selector": "none"},
    "chunk_head 16": {"selector": "chunk_head", "head_tokens": 16},
    "query 15 %": {"selector": "query", "ratio": 0.15},
    "query 15 %, GPU pool": {"selector": "query", "ratio": 0.15},
}


def ttft(prompt_tokens: int, full_ms: float) -> dict[str, Any]:
    arms: dict[str, Any] = {"full": {"median_ms": full_ms, "options": {"policy": "full"}}}
    for number, (name, options) in enumerate(ARMS.items()):
        arms[name] = {
            "median_ms": full_ms * (0.2 + 0.05 * number),
            "share_of_full": 0.2 + 0.05 * number,
            "options": options,
            "bytes_loaded": {"gpu": 1} if "pool" in name else {"host": 1},
            "parts_ms": {"load": 2.0, "score": 3.0 * number, "a new stage": 1.0},
            "floor_ms": full_ms * 0.15,
        }
    return {
        "device": "NVIDIA H200",
        "model": "Llama-3-8B shape",
        "prompt_tokens": prompt_tokens,
        "arms": arms,
        "measured_parts": {"full_prefill_ms": {"512": 14.0, "2048": 47.0}},
    }


def row(name: str, ratio: float, agreement: float) -> dict[str, Any]:
    interval = {"mean": agreement, "low": agreement - 0.1, "high": agreement + 0.1}
    return {"name": name, "recomputed_ratio": ratio, "agreement": interval, "kl_first": interval}


FIDELITY = {
    "model": {"name": "some model"},
    "data": {"name": "musique_s.json"},
    "questions": 150,
    "noise_floor": "full-again",
    "rows": [
        row("full", 1.0, 1.0),
        row("full-again", 1.0, 0.99),
        row("prefix-cached", 0.0, 0.99),
        row("reuse", 0.0, 0.2),
        row("chunk_head:16", 0.025, 0.25),
        row("chunk_head:32", 0.05, 0.3),
        row("query:0.15", 0.15, 0.45),
        row("query:0.30", 0.3, 0.55),
    ],
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "ttft.json").write_text(json.dumps(ttft(5888, 150.0)))
    (folder / "ttft-18-chunks.json").write_text(json.dumps(ttft(11648, 310.0)))
    ratios = [{"options": {"selector": "query", "ratio": ratio}, "share_of_full": 0.2 + ratio} for ratio in (0.15, 0.3)]
    (folder / "ratios.json").write_text(json.dumps({"ratios": ratios}))
    (folder / "fidelity.json").write_text(json.dumps(FIDELITY))
    return folder


def comments(path: Path) -> list[str]:
    """The texts of an SVG, which matplotlib states as comments beside their outlines."""
    return [line.strip()[5:-4] for line in path.read_text().splitlines() if line.strip().startswith("<!--")]


def test_one_command_draws_every_plot(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "plots"
    arguments = ["--results", str(results), "--out", str(out), "--fidelity", str(results / "fidelity.json")]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    drawn = {
        "ttft-by-length.png",
        "ttft-parts-5888.png",
        "ttft-parts-11648.png",
        "fidelity-by-recomputed.png",
        "fidelity-by-ttft.png",
    }
    assert {path.name for path in out.iterdir()} == drawn
    assert all(imread(path).std() > 0.01 for path in out.iterdir())


def test_without_a_fidelity_report_only_speed_is_drawn(results: Path, tmp_path: Path) -> None:
    (results / "ratios.json").unlink()
    ran = CliRunner().invoke(app, ["--results", str(results), "--out", str(tmp_path / "plots")])
    assert ran.exit_code == 0, ran.output
    assert not list((tmp_path / "plots").glob("fidelity*"))


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "ttft-18-chunks.json",
            None,
            "cannot be read (No such file or directory); measure again with `make gpu-bench`",
        ),
        ("ttft.json", "{", "is no JSON"),
        ("ttft.json", "[]", "holds no result"),
        ("ratios.json", "{}", "does not state what the plots need ('ratios')"),
        ("fidelity.json", "{}", "name the result.json of a finished `python -m eval.musique`"),
    ],
)
def test_an_input_that_lacks_is_one_sentence_and_exit_2(
    name: str, text: str | None, complaint: str, results: Path, tmp_path: Path
) -> None:
    (results / name).unlink()
    if text is not None:
        (results / name).write_text(text)
    out = tmp_path / "plots"
    arguments = ["--results", str(results), "--out", str(out), "--fidelity", str(results / "fidelity.json")]
    ran = CliRunner().invoke(app, arguments)
    said = " ".join(ran.output.split())
    assert ran.exit_code == 2
    assert name in said.replace(" ", "")
    assert complaint.replace(" ", "") in said.replace(" ", "")
    assert not out.exists()


def test_a_result_without_floors_says_to_measure_again(results: Path, tmp_path: Path) -> None:
    old = ttft(5888, 150.0)
    del old["measured_parts"]
    (results / "ttft.json").write_text(json.dumps(old))
    ran = CliRunner().invoke(app, ["--results", str(results), "--out", str(tmp_path / "plots")])
    assert ran.exit_code == 2
    assert "make gpu-bench" in " ".join(ran.output.split())


def test_each_arm_has_a_panel_with_its_distance_from_the_floor(results: Path, tmp_path: Path) -> None:
    runs = [read_ttft(results / name) for name in ("ttft-18-chunks.json", "ttft.json")]
    plot_ttft_by_length(runs, tmp_path / "lengths.svg")
    texts = comments(tmp_path / "lengths.svg")
    assert set(ARMS) <= set(texts)
    # 0.2 and 0.25 of full over a floor of 0.15 of full, at two lengths.
    assert texts.count("1.33 x") == 2
    assert texts.count("1.67 x") == 2
    assert "floor, same run" in texts


def test_arms_that_one_length_lacks_are_left_out(results: Path, tmp_path: Path) -> None:
    fewer = ttft(11648, 310.0)
    del fewer["arms"]["reuse"]
    (results / "ttft-18-chunks.json").write_text(json.dumps(fewer))
    runs = [read_ttft(results / name) for name in ("ttft-18-chunks.json", "ttft.json")]
    plot_ttft_by_length(runs, tmp_path / "lengths.svg")
    texts = comments(tmp_path / "lengths.svg")
    assert "reuse" not in texts
    assert "chunk_head 16" in texts


def test_the_bars_name_every_stage_and_what_is_left(results: Path, tmp_path: Path) -> None:
    plot_parts(read_ttft(results / "ttft.json"), tmp_path / "parts.svg")
    texts = comments(tmp_path / "parts.svg")
    assert {"load", "score", "a new stage", "engine step and question", "floor", *ARMS} <= set(texts)
    assert "30.0 ms, 0.20 of full, 1.33 of the floor" in " ".join(texts)


def test_times_along_a_selectors_ratios_come_from_one_run_and_never_from_the_pool(results: Path) -> None:
    shares = read_shares(results)
    assert shares["query", 0.15, None, False] == pytest.approx(0.35)
    assert shares["query", 0.3, None, False] == pytest.approx(0.5)
    assert shares["chunk_head", None, 16, False] == pytest.approx(0.25)
    (results / "ratios.json").write_text('{"ratios": []}')
    assert read_shares(results)["query", 0.15, None, False] == pytest.approx(0.3)


def test_full_prefill_of_any_kind_is_no_arm_of_the_dial(results: Path) -> None:
    run = read_fidelity(results / "fidelity.json")
    assert [arm.name for arm in run.arms] == ["reuse", "chunk_head:16", "chunk_head:32", "query:0.15", "query:0.30"]
    assert run.noise_floor is not None
    assert run.noise_floor.agreement.mean == 0.99


def test_a_report_without_a_noise_floor_is_drawn(results: Path, tmp_path: Path) -> None:
    without = copy.deepcopy(FIDELITY) | {"noise_floor": None}
    (results / "fidelity.json").write_text(json.dumps(without))
    plot_against_recomputed(read_fidelity(results / "fidelity.json"), tmp_path / "dial.svg")
    assert not any("noise floor" in text for text in comments(tmp_path / "dial.svg"))


def test_the_dial_against_time_shows_timed_arms_only(results: Path, tmp_path: Path) -> None:
    run = read_fidelity(results / "fidelity.json")
    plot_against_ttft(run, read_shares(results), "an H200", tmp_path / "dial.svg")
    texts = comments(tmp_path / "dial.svg")
    assert texts.count("16") == 2
    assert "32" not in texts
    assert texts.count("0.30") == 2
    assert any("an H200" in text for text in texts)


def test_arms_that_carry_drift_are_a_line_of_their_own_at_their_own_time(results: Path, tmp_path: Path) -> None:
    rows = [*FIDELITY["rows"], row("query:0.15:drift", 0.15, 0.6), row("deviation:0.15:drift", 0.15, 0.5)]
    (results / "fidelity.json").write_text(json.dumps(FIDELITY | {"rows": rows}))
    options = {"selector": "query", "ratio": 0.15, "carry_drift": True}
    ratios = json.loads((results / "ratios.json").read_text())["ratios"]
    (results / "ratios.json").write_text(json.dumps({"ratios": [*ratios, {"options": options, "share_of_full": 0.5}]}))
    shares = read_shares(results)
    assert (shares["query", 0.15, None, False], shares["query", 0.15, None, True]) == (pytest.approx(0.35), 0.5)
    plot_against_ttft(read_fidelity(results / "fidelity.json"), shares, "an H200", tmp_path / "dial.svg")
    texts = comments(tmp_path / "dial.svg")
    assert "query, drift" in texts
    assert "deviation, drift" not in texts, "it was not timed"
    assert texts.count("0.15") == 2 * 2, "both arms stand at their ratio, in both panels"


def test_the_committed_fidelity_report_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "eval" / "results" / "2026-11-29-cpu" / "musique_s-smollm2-135m"
    run: FidelityRun = read_fidelity(folder / "result.json")
    assert run.questions == 10
    assert ("query", 0.15, None, False) in {arm.key for arm in run.arms}
