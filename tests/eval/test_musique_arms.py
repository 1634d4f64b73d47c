"""The grammar of arms and tiers."""

import pytest

from cacheblend.plan import Policy
from eval.errors import EvalError
from eval.fidelity.arms import parse_arms, parse_tiers, report_rows


def test_full_is_always_the_first_arm_and_there_once() -> None:
    assert [arm.name for arm in parse_arms("reuse")] == ["full", "reuse"]
    assert [arm.name for arm in parse_arms("reuse, full,query:0.15")] == ["full", "reuse", "query:0.15"]
    assert [arm.policy for arm in parse_arms("reuse")] == [Policy.FULL, Policy.BLEND]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("reuse", "none"),
        ("full-again", "full"),
        ("chunk_head", "chunk_head(16)"),
        ("chunk_head:32", "chunk_head(32)"),
        ("chunk_head:0.1", "chunk_head(ratio=0.1)"),
        ("deviation:0.30", "deviation(ratio=0.3,check=1)"),
        ("query:1.0", "query(ratio=1.0)"),
        ("chunk_head+query:.25", "chunk_head(16)+query(ratio=0.25)"),
        ("chunk_head+query:8:0.25", "chunk_head(8)+query(ratio=0.25)"),
        ("chunk_head+query:0.25:8", "chunk_head(8)+query(ratio=0.25)"),
    ],
)
def test_an_arm_names_its_selector_with_parameters(name: str, spec: str) -> None:
    arm = parse_arms(name)[1]
    assert arm.name == name
    assert arm.selector is not None
    assert arm.selector.spec == spec


NO_ARMS = """
    query:0.15:drift:drift nonsense none reuse:0.1 full:1 query:16 query:1.5 query:0.1:0.2 query:1e-1 query: deviation:x
    chunk_head:-1 chunk_head:16:0.1 reuse,reuse reuse, query:0.15,query:0.15
"""


@pytest.mark.parametrize("text", ["", *NO_ARMS.split()])
def test_what_is_no_arm_is_refused_in_one_sentence_that_names_it(text: str) -> None:
    with pytest.raises(EvalError) as refused:
        parse_arms(text)
    message = str(refused.value)
    assert message.startswith(f"Arm '{text.split(',')[-1].strip()}'")
    assert "\n" not in message
    assert message.endswith(".")


def test_drift_is_a_parameter_of_an_arm_beside_others() -> None:
    _, plain, moved = parse_arms("query:0.15,query:0.15:drift")
    assert (plain.carry_drift, moved.carry_drift) == (False, True)
    assert moved.selector == plain.selector


def test_every_blended_arm_has_a_row_for_each_tier_and_full_prefill_has_one() -> None:
    rows = report_rows(parse_arms("full,full-again,reuse"), parse_tiers("warm,cold"))
    assert [(row.arm.name, row.tier) for row in rows] == [
        ("full", "warm"),
        ("full-again", "warm"),
        ("reuse", "warm"),
        ("reuse", "cold"),
    ]


@pytest.mark.parametrize("text", ["", "hot", "warm,warm", "warm,"])
def test_what_is_no_tier_is_refused(text: str) -> None:
    with pytest.raises(EvalError, match="use warm, cold or warm,cold"):
        parse_tiers(text)
