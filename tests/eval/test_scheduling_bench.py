"""`python -m eval.scheduling` from end to end, in small, and what its workload keeps the same for every catalogue."""

import gc
import json

import pytest
from typer.testing import CliRunner

from eval.scheduling import Traffic, app, run
from kvstore.tiers import Tier


def call(*arguments: str):
    return CliRunner().invoke(app, ["--catalogues", "10,200", "--steps", "60", "--warm-up", "20", *arguments])


def test_it_prints_microseconds_for_every_catalogue_and_writes_them_with_their_provenance(tmp_path) -> None:
    out = tmp_path / "results" / "scheduling.json"
    result = call("--out", str(out))
    assert result.exit_code == 0, result.output
    assert "p50 with the most chunks over p50 with the fewest" in result.stdout
    assert str(tmp_path) not in out.read_text()
    written = json.loads(out.read_text())
    assert [(row["chunks"], row["all_advice_about_stored"]) for row in written["catalogues"]] == [
        (10, False),
        (200, False),
        (200, True),
    ]
    for row in written["catalogues"]:
        assert 0 < row["us"]["p50"] <= row["us"]["p95"] <= row["us"]["p99"] <= row["us"]["max"]
    assert written["p50_ratio_most_to_fewest"] > 0
    assert {"time_utc", "device", "versions", "code", "seed", "arguments"} <= written["provenance"].keys()
    assert written["provenance"]["arguments"] == {"catalogues": [10, 200], "steps": 60, "warm_up": 20}


def test_every_catalogue_has_as_much_moved_and_the_scheduler_keeps_its_budgets() -> None:
    for size in (10, 100, 2_000):
        traffic = Traffic(size, 1)
        for _ in range(200):
            traffic.step(lambda: 0)
            for tier in (Tier.GPU, Tier.HOST):
                assert traffic._scheduler.used_bytes(tier) <= traffic._scheduler.budget_bytes(tier)
            assert traffic._scheduler.pinned() == (10 if traffic._steps >= 20 and traffic._steps % 20 < 2 else 0)
        assert 3 < traffic.moves / 200 < 6


def test_collections_are_on_and_charged_and_what_was_frozen_is_thawed() -> None:
    """A threshold of a few objects: there are collections, and the steps are charged with them."""
    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        result = run([10, 100], 50, 0, 0)
    finally:
        gc.set_threshold(*before)
    assert result["collections"] > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--catalogues", "ten"], "ten"), (["--catalogues", "9"], "fewer than 10")]
)
def test_bad_input_ends_with_one_sentence(arguments, named) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr


def test_a_file_that_cannot_be_written_ends_with_one_sentence(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    result = call("--out", str(tmp_path / "file" / "below.json"))
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
