"""Notes of the report on what a run's questions were answered over."""

import pytest

from eval.fidelity.outputs import report_notes
from eval.fidelity.summary import BuildSummary, RunSummary

SUMMARY = RunSummary(
    rows=(),
    noise_floor=None,
    questions=4,
    full_is_right=2,
    cpu_over_wall=None,
    busy_enough=1.7,
    timing_is_void=False,
    build=BuildSummary(0, 0, 40, 0.0, None),
    gates=None,
    comparisons=(),
)
SETTINGS = {"tiers": ["warm"], "left_out": 0, "primer": None}


@pytest.mark.parametrize(
    ("retrieved", "words"),
    [
        ({"top_k": 5, "contexts": 1255}, "over 5 contexts retrieved from 1,255, not over its own."),
        ({"top_k": 5, "contexts": 3}, "over 3 contexts retrieved from 3, not over its own."),
    ],
)
def test_contexts_that_were_retrieved_are_stated_and_of_own_ones_nothing_is_said(retrieved, words) -> None:
    over_retrieved = report_notes(SUMMARY, {**SETTINGS, "retrieved": retrieved})
    over_own = report_notes(SUMMARY, {**SETTINGS, "retrieved": None})
    assert [note for note in over_retrieved if note not in over_own] == [f"Each question was answered {words}"]
