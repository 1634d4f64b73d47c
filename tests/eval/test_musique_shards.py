"""Parts of a run, and what may differ between the calls that make it up."""

from pathlib import Path

import pytest

from eval.errors import EvalError
from eval.fidelity.arms import parse_arms, parse_tiers, report_rows, require_runnable
from eval.fidelity.records import DivergenceRecord
from eval.fidelity.settings import CODE, code_digest, open_results
from eval.fidelity.shards import Clock, Shard, parse_shard
from eval.provenance import REPOSITORY

SETTINGS = {"seed": 0, "code": "a", "arms": ["full", "reuse"], "questions": 3}


def test_the_shards_of_a_run_hold_every_question_once() -> None:
    shards = [parse_shard(f"{number}/4").of(range(10)) for number in (1, 2, 3, 4)]
    assert [list(shard) for shard in shards] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert list(Shard().of(range(3))) == [0, 1, 2]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2", "1/0", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(EvalError, match="cannot be run"):
        parse_shard(text)


def test_a_clock_is_up_after_its_minutes_and_never_without_any() -> None:
    assert Clock(0.0).is_up()
    assert not Clock(60.0).is_up()
    assert not Clock(None, started=-1e9).is_up()


def test_a_later_call_may_ask_for_other_arms_and_questions_but_not_of_other_code(tmp_path: Path) -> None:
    with open_results(tmp_path, SETTINGS, fresh=False) as log:
        log.append(DivergenceRecord("q1", "reuse", 0.5, 0.25, 3))
    more = {**SETTINGS, "arms": ["full", "query:0.15"], "questions": 150}
    with open_results(tmp_path, more, fresh=False) as log:
        assert log.divergences
    with pytest.raises(EvalError, match=r"other settings \(code\)"):
        open_results(tmp_path, {**more, "code": "b"}, fresh=False)


def test_the_code_a_result_depends_on_is_known_by_its_sources(tmp_path: Path) -> None:
    for name in ("cacheblend/a.py", "eval/fidelity/run.py", "eval/fidelity/outputs.py", "docs/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    digests = [code_digest(tmp_path)]
    for name in ("docs/a.py", "eval/fidelity/outputs.py", "cacheblend/a.py", "eval/fidelity/run.py"):
        (tmp_path / name).write_text("2\n")
        digests.append(code_digest(tmp_path))
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[2:])) == 3
    assert all((REPOSITORY / name).exists() for name in CODE)


def test_the_arms_of_the_quality_table_can_be_named() -> None:
    shares = ("0.05", "0.10", "0.15", "0.20", "0.30", "0.50")
    names = [
        *("full-again", "prefix-cached", "reuse", *(f"chunk_head:{tokens}" for tokens in (4, 16, 32, 96))),
        *(f"{selector}:{share}" for selector in ("deviation", "query", "chunk_head+query") for share in shares),
    ]
    rows = report_rows(parse_arms(",".join(names)), parse_tiers("warm"))
    assert [row.arm.name for row in rows] == ["full", *names]


def test_an_engine_is_not_loaded_for_what_it_cannot_do() -> None:
    cached = report_rows(parse_arms("prefix-cached"), parse_tiers("warm"))
    cold = report_rows(parse_arms("reuse"), parse_tiers("warm,cold"))
    require_runnable(cached, on_vllm=True)
    require_runnable(cold, on_vllm=False)
    with pytest.raises(EvalError, match="needs --engine vllm"):
        require_runnable(cached, on_vllm=False)
    with pytest.raises(EvalError, match="leave out the tier cold"):
        require_runnable(cold, on_vllm=True)
