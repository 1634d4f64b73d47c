"""Results on disk: what is finished stays, what was cut off goes, what is of other settings is refused."""

import json
from pathlib import Path

import pytest

from eval.errors import EvalError
from eval.fidelity.records import BuildRecord, DivergenceRecord, ResultLog
from eval.fidelity.settings import RECORDS_FILE, SETTINGS_FILE, open_results

RECORD = DivergenceRecord("q1", "reuse", 0.5, 0.25, 3)
SETTINGS = {"seed": 0, "arms": ["full", "reuse"]}


def test_records_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with ResultLog(path) as log:
        log.append(RECORD)
        log.append(BuildRecord("q1", 3, 300, 12_000, 1.5))
    with ResultLog(path) as log:
        assert log.divergences == {("q1", "reuse"): RECORD}
        assert log.builds["q1"].bytes == 12_000


@pytest.mark.parametrize("cut", [b'{"record": "diverg', b"\xff", b"{}", b'"\xe2\x80'])
def test_a_last_line_that_was_cut_off_is_dropped_and_the_next_record_is_whole(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "records.jsonl"
    with ResultLog(path) as log:
        log.append(RECORD)
    whole = path.read_bytes()
    path.write_bytes(whole + cut)
    with ResultLog(path) as log:
        assert list(log.divergences) == [("q1", "reuse")]
        log.append(DivergenceRecord("q2", "reuse", 0.5, 0.25, 3))
    assert path.read_bytes().startswith(whole)
    with ResultLog(path) as log:
        assert list(log.divergences) == [("q1", "reuse"), ("q2", "reuse")]


def test_whole_lines_that_another_shard_adds_meanwhile_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with ResultLog(path) as one, ResultLog(path) as other:
        one.append(RECORD)
        other.append(DivergenceRecord("q2", "reuse", 0.5, 0.25, 3))
        one.append(DivergenceRecord("q3", "reuse", 0.5, 0.25, 3))
    with ResultLog(path) as log:
        assert [question for question, _ in log.divergences] == ["q1", "q2", "q3"]


def test_a_log_catches_up_with_what_other_shards_have_added(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with ResultLog(path) as one, ResultLog(path) as other:
        one.append(RECORD)
        other.append(DivergenceRecord("q2", "reuse", 0.5, 0.25, 3))
        one.catch_up()
        assert [question for question, _ in one.divergences] == ["q1", "q2"]


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"3", b"\xff", b'{"record": "other"}', b'{"record": "divergence", "question": "q"}', b""],
)
def test_a_whole_line_that_is_no_record_is_refused_with_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "records.jsonl"
    with ResultLog(path) as log:
        log.append(RECORD)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(EvalError, match=r"line 2: .*--fresh"):
        ResultLog(path)


def test_results_of_other_settings_are_refused_and_kept_until_thrown_away(tmp_path: Path) -> None:
    with open_results(tmp_path, SETTINGS, fresh=False) as log:
        log.append(RECORD)
    with open_results(tmp_path, SETTINGS, fresh=False) as log:
        assert log.divergences
    with pytest.raises(EvalError, match=r"other settings \(seed\); .*--fresh"):
        open_results(tmp_path, {**SETTINGS, "seed": 1}, fresh=False)
    assert json.loads((tmp_path / SETTINGS_FILE).read_text()) == SETTINGS
    with open_results(tmp_path, {**SETTINGS, "seed": 1}, fresh=True) as log:
        assert not log.divergences


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_results_whose_settings_are_unknown_are_refused(tmp_path: Path, content: str | None) -> None:
    with open_results(tmp_path, SETTINGS, fresh=False) as log:
        log.append(RECORD)
    (tmp_path / SETTINGS_FILE).unlink()
    if content is not None:
        (tmp_path / SETTINGS_FILE).write_text(content)
    with pytest.raises(EvalError, match="does not say of which settings"):
        open_results(tmp_path, SETTINGS, fresh=False)
    assert (tmp_path / RECORDS_FILE).stat().st_size


def test_settings_without_results_yet_may_change(tmp_path: Path) -> None:
    open_results(tmp_path, SETTINGS, fresh=False).close()
    open_results(tmp_path, {**SETTINGS, "seed": 1}, fresh=False).close()
    assert json.loads((tmp_path / SETTINGS_FILE).read_text())["seed"] == 1


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(EvalError, match="cannot be written"):
        open_results(tmp_path / "out", SETTINGS, fresh=False)
