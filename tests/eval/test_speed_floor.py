"""Floors, lines, interleaved rounds and closed loops: the arithmetic of the GPU measurements."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.errors import EvalError
from eval.speed.closed_loop import Block, Served, loop_values
from eval.speed.floor import ArmWork, MeasuredParts, floor_of, layer_weight_bytes, recomputed_rows
from eval.speed.interleaved import WARM_UP, Setting, interleave
from eval.speed.lines import fit_line

PARTS = MeasuredParts(link_gb_s=50.0, weights_ms=4.0, row_ms=0.02, full_ms=150.0, step_ms=5.0)
WORK = ArmWork("none", system_rows=64, question_rows=64, recomputed_rows=0, host_bytes=750_000_000, layers=32)


def test_reuse_costs_its_load_and_a_step() -> None:
    floor = floor_of(WORK, PARTS)
    assert floor.terms_ms["load"] == pytest.approx(15.0)
    assert floor.ms == pytest.approx(15.0 + 5.0)


def test_reuse_from_the_gpu_pool_costs_a_pass_over_the_weights_and_a_step() -> None:
    assert floor_of(replace(WORK, host_bytes=0), PARTS).ms == pytest.approx(4.0 + 5.0)


def test_reuse_from_the_gpu_pool_behind_a_cached_system_prompt_costs_a_step() -> None:
    assert floor_of(replace(WORK, host_bytes=0, system_rows=0), PARTS).ms == pytest.approx(5.0)


def test_heads_hide_behind_the_load_until_they_take_longer() -> None:
    few = replace(WORK, selector="chunk_head", recomputed_rows=144)
    many = replace(few, recomputed_rows=936)
    assert floor_of(few, PARTS).ms == pytest.approx(15.0 + 5.0)
    assert floor_of(many, PARTS).ms == pytest.approx(1000 * 0.02 + 5.0)


def test_deviation_computes_two_layers_whole() -> None:
    floor = floor_of(replace(WORK, selector="deviation", recomputed_rows=936), PARTS)
    assert floor.ms == pytest.approx(150 / 16 + 20 * 15 / 16 + 5.0)


@pytest.mark.parametrize("selector", ["query", "chunk_head+query"])
def test_what_looks_at_the_question_needs_all_keys_first(selector: str) -> None:
    floor = floor_of(replace(WORK, selector=selector, recomputed_rows=900), PARTS)
    assert floor.ms == pytest.approx(15.0 + 4.0 + 18.0 + 5.0)
    assert floor.ms == pytest.approx(sum(floor.terms_ms.values()))


def test_heads_beside_deviation_cost_what_deviation_costs() -> None:
    both, alone = (replace(WORK, selector=name, recomputed_rows=936) for name in ("chunk_head+deviation", "deviation"))
    assert floor_of(both, PARTS) == floor_of(alone, PARTS)


def test_a_selector_without_a_formula_is_refused() -> None:
    with pytest.raises(EvalError, match="No floor is stated for selector 'full'"):
        floor_of(replace(WORK, selector="full"), PARTS)


@given(
    selector=st.sampled_from(["none", "chunk_head", "deviation", "query"]),
    rows=st.integers(0, 10_000),
    more=st.integers(0, 10_000),
    host_bytes=st.integers(0, 10**10),
)
@settings(max_examples=60)
def test_no_floor_falls_when_more_is_recomputed_or_loaded(selector: str, rows: int, more: int, host_bytes: int) -> None:
    work = ArmWork(selector, 64, 64, rows, host_bytes, 32)
    floor = floor_of(work, PARTS).ms
    assert floor_of(replace(work, recomputed_rows=rows + more), PARTS).ms >= floor
    assert floor_of(replace(work, host_bytes=0), PARTS).ms <= floor
    assert floor >= PARTS.step_ms + PARTS.weights_ms


def test_rows_are_counted_from_the_options_of_the_request() -> None:
    assert recomputed_rows({"selector": "query", "ratio": 0.15}, 9, 640) == 864
    assert recomputed_rows({"selector": "chunk_head", "head_tokens": 16}, 9, 640) == 128
    assert recomputed_rows({"selector": "chunk_head+query", "head_tokens": 16, "ratio": 0.15}, 9, 640) == 864
    assert recomputed_rows({"selector": "none"}, 9, 640) == 0
    assert recomputed_rows({"selector": "query", "ratio": 0.95}, 9, 640) == 8 * 640
    assert recomputed_rows({"selector": "query", "ratio": 1.0}, 9, 640) == 9 * 640


def test_the_layers_of_the_8b_model_weigh_14_gigabytes() -> None:
    config = {
        "hidden_size": 4096,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
    }
    assert layer_weight_bytes(config) == 13_958_643_712


@given(intercept=st.floats(1, 100), slope=st.floats(0.001, 10), xs=st.sets(st.integers(0, 1000), min_size=2))
@settings(max_examples=40)
def test_points_on_a_line_give_the_line(intercept: float, slope: float, xs: set[int]) -> None:
    ordered = sorted(map(float, xs))
    line = fit_line(ordered, [intercept + slope * x for x in ordered])
    assert line.slope == pytest.approx(slope, rel=1e-6)
    assert line.at(0.0) == pytest.approx(intercept, rel=1e-4, abs=1e-4)
    assert line.worst_residual < 1e-6


def test_the_worst_residual_is_a_share_of_the_time() -> None:
    assert fit_line([0, 1, 2], [10.0, 13.0, 10.0]).worst_residual == pytest.approx(2 / 13)


def test_a_line_through_one_length_is_refused() -> None:
    with pytest.raises(EvalError, match="two lengths or more"):
        fit_line([512, 512], [10.0, 11.0])


def test_a_line_says_where_it_reaches_a_level() -> None:
    line = fit_line([0, 100, 200], [30.0, 50.0, 70.0])
    assert line.reaches(80.0) == pytest.approx(250)
    assert line.at(line.reaches(35.0)) == pytest.approx(35)


def test_every_run_takes_its_turn_within_its_setting_and_warm_ups_do_not_count() -> None:
    state, seen = [""], []

    def run(name: str, needs: str):
        def once() -> tuple[float, dict[str, int]]:
            assert state[0] == needs
            seen.append(name)
            return float(len(seen)), {"number": len(seen)}

        return once

    def enter(name: str):
        return lambda: state.__setitem__(0, name)

    host = Setting(enter("host"), {name: run(name, "host") for name in ("a", "b", "c")})
    gpu = Setting(enter("gpu"), {"d": run("d", "gpu")})
    rounds = []
    taken = interleave([host, gpu], 6, rounds.append)
    assert rounds == [1, 2, 3, 4, 5, 6]
    assert {name: len(one.ms) for name, one in taken.items()} == dict.fromkeys("abcd", 6)
    assert min(ms for one in taken.values() for ms in one.ms) == 4 * WARM_UP + 1
    assert [account["number"] for account in taken["d"].accounts] == taken["d"].ms
    assert len({tuple(seen[at : at + 4]) for at in range(0, len(seen), 4)}) > 2


def test_a_run_that_fails_ends_alone_and_a_setting_that_cannot_be_entered_ends_its_own() -> None:
    turns = {"good": 0, "bad": 0}

    def good() -> tuple[float, dict[str, int]]:
        turns["good"] += 1
        return 1.0, {}

    def bad() -> tuple[float, dict[str, int]]:
        turns["bad"] += 1
        raise RuntimeError("served otherwise")

    def never() -> None:
        raise SystemExit("the chunks do not come")

    settings_ = [Setting(lambda: None, {"good": good, "bad": bad}), Setting(never, {"unreachable": good})]
    taken = interleave(settings_, 2, lambda number: None)
    assert turns == {"good": 2 + WARM_UP, "bad": 1}
    assert taken["good"].error is None
    assert "served otherwise" in str(taken["bad"].error)
    assert "the chunks do not come" in str(taken["unreachable"].error)
    assert taken["unreachable"].ms == []


def test_a_blocks_rate_counts_its_beginning_and_its_end() -> None:
    block = Block([Served(10.0, 10.5, 11.5, 11), Served(10.0, 11.0, 14.0, 11)])
    assert block.seconds == 4.0
    assert block.requests_per_s == 0.5


def test_the_values_of_a_loop_are_over_all_its_requests() -> None:
    blocks = [Block([Served(0.0, 0.5, 1.5, 11)]), Block([Served(10.0, 11.5, 13.0, 6), Served(10.0, 11.0, 13.0, 11)])]
    values = loop_values(blocks)
    assert values["requests_per_s"] == pytest.approx(3 / 4.5)
    assert values["tpot_ms_mean"] == pytest.approx((100 + 300 + 200) / 3)
    assert values["ttft_ms_p50"] == pytest.approx(1000.0)
    assert values["ttft_ms_p99"] == pytest.approx(1490.0)
    json.dumps(values)
