"""`python -m eval.disk_bandwidth` from end to end, with small files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.disk_bandwidth import READERS, Arm, Reading, Stand, app, bandwidths
from kvstore.chunk import tensor_bytes


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["--files", "3", "--chunk-tokens", "2", "--rounds", "2", *map(str, arguments)])


def test_it_prints_the_shares_and_writes_every_round_with_its_provenance_but_no_folder(tmp_path) -> None:
    folder, out = tmp_path / "disk", tmp_path / "results" / "bandwidth.json"
    folder.mkdir()
    result = call("--folder", folder, "--out", out)
    assert result.exit_code == 0, result.output
    assert "The tier with 4 readers over the device's best:" in result.stdout
    written = json.loads(out.read_text())
    for state in ("cold", "warm"):
        values = written[state]
        assert values["share"] == values["tier"]["4"] / max(values["device"].values())
        assert set(values["bytes_per_s"]) == {f"{way}:{readers}" for way in ("device", "tier") for readers in READERS}
        assert all(len(rounds) == 2 for rounds in values["bytes_per_s"].values())
    assert {"device", "versions", "code", "seed", "time_utc", "load_average"} <= set(written["provenance"])
    assert str(tmp_path) not in out.read_text()
    assert list(folder.iterdir()) == []


def readings(**seconds: float) -> dict[Arm, list[Reading]]:
    """Files of 100 bytes in all, read once by every arm: the seconds that are given, else ten."""
    arms = [Arm(way, readers) for way in ("device", "tier") for readers in READERS]
    return {arm: [Reading(100, seconds.get(f"{arm.way}_{arm.readers}", 10.0), 100)] for arm in arms}


def test_the_share_is_that_of_serving_over_the_best_that_the_device_gave() -> None:
    values = bandwidths(readings(device_1=5.0, device_8=2.0, tier_1=1.0, tier_4=4.0))
    assert values["device"] == {1: 20.0, 2: 10.0, 4: 10.0, 8: 50.0}
    assert values["share"] == 0.5


def test_one_disturbed_round_does_not_decide() -> None:
    found = readings(device_1=1.0, tier_4=1.0)
    found[Arm("tier", 4)] += [Reading(100, 1.0, 100), Reading(100, 1000.0, 100)]
    assert bandwidths(found)["share"] == 1.0


@pytest.mark.parametrize(("from_device", "expected"), [((100, 40), 0.4), ((100, None), 1.0), ((None, None), None)])
def test_what_came_from_memory_is_stated(from_device, expected) -> None:
    found = readings()
    found = {arm: [Reading(100, 1.0, from_device[arm.way == "tier"])] for arm in found}
    assert bandwidths(found)["share_of_device_bytes"] == expected


def test_the_tier_reads_every_file_into_the_memory_that_was_there_before(tmp_path) -> None:
    stand = Stand(tmp_path, files=3, chunk_tokens=2)
    memory = list(stand._memory)
    assert not any(kv.view(-1).any() for kv in memory)
    reading = stand.read(Arm("tier", 2), cold=True)
    assert reading.nbytes == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    contents = [bytes(tensor_bytes(kv)) for kv in memory]
    stand.read(Arm("device", 2), cold=True)
    assert contents == [bytes(tensor_bytes(kv)) for kv in memory]
    assert len(set(contents)) == 3


def test_files_that_never_left_memory_make_the_cold_result_void() -> None:
    """Nothing that lies in a file system in memory is ever read from a device."""
    result = call("--folder", "/dev/shm")
    assert result.exit_code == 0, result.output
    assert "VOID: cold files came from memory" in result.stdout


def test_a_folder_that_cannot_be_used_ends_in_one_sentence(tmp_path) -> None:
    result = call("--folder", tmp_path / "absent")
    assert result.exit_code == 2
    assert f"The folder {tmp_path / 'absent'} cannot be used" in result.stderr
    assert "Traceback" not in result.output


def test_a_result_that_cannot_be_written_ends_in_one_sentence(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = call("--folder", tmp_path, "--out", Path(tmp_path / "file" / "result.json"))
    assert result.exit_code == 2
    assert "name a writable file" in result.stderr
