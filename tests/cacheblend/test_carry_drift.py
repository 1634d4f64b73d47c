"""Rows that move by the drift of others: the twin against the definition, and the Triton kernels.

Where triton is installed its interpreter runs the kernels themselves, on the CPU and in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

# Where it runs as a program for the interpreter, pytest has put nothing on the path.
sys.path.insert(0, str(Path(__file__).parent))

from carry_drift_samples import DriftCase, by_definition, by_twin, drift_case
from triton_interpreter import interpreted_results

from cacheblend.kernels.carry_drift import DriftPass


def cases() -> dict[str, DriftCase]:
    """Small, for the interpreter is slow."""
    return {
        "stacked pages": drift_case(),
        "packed pages": drift_case(layout="packed"),
        "pages apart": drift_case(layout="apart"),
        "one chunk": drift_case(((70, 1),)),
        "heads no power of two": drift_case(kv_heads=3, head_dim=24),
        "heads of 64": drift_case(((30, 5),), kv_heads=1, head_dim=64),
        "heads of 128": drift_case(((30, 5),), kv_heads=1, head_dim=128),
        "block size no power of two": drift_case(block_size=24),
        "rows of an earlier pass": drift_case(more=1),
        "rows of an earlier pass alone": drift_case(((9, 2), (7, 2)), more=2),
    }


def error(moved: tuple[torch.Tensor, torch.Tensor], exact: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest of keys and values."""
    return max(float((m.double() - e).abs().max()) for m, e in zip(moved, exact, strict=True))


@pytest.mark.parametrize("name", cases())
def test_the_twin_is_the_definition(name):
    case = cases()[name]
    assert error(by_twin(case), by_definition(case)) < 1e-5


def test_tiles_hold_every_row_once_and_never_rows_of_two_chunks():
    rows = drift_case(((200, 10), (64, 1), (65, 1))).rows
    covered = [row for first, end, _, _ in rows.tiles.tolist() for row in range(first, end)]
    assert covered == list(range(len(rows.left_slots)))
    told_by_left = {range(c.left, c.left_end): (c.told, c.told_end) for c in rows.chunks}
    for first, end, told, told_end in rows.tiles.tolist():
        (chunk,) = [left for left in told_by_left if first in left and end - 1 in left]
        assert told_by_left[chunk] == (told, told_end)


def interpret_the_kernels() -> dict[str, float]:
    """Run in a process whose triton interprets: the largest error of each case."""
    errors = {}
    for name, case in cases().items():
        exact, told = by_definition(case), case.stored(case.rows.of_pass_slots)
        DriftPass(case.rows, case.rotations).move(case.keys, case.values, case.layer, case.more)
        errors[name] = error(case.stored(case.rows.left_slots), exact)
        # Rows that tell are the caller's to write.
        assert all(map(torch.equal, case.stored(case.rows.of_pass_slots), told))
    return errors


if importlib.util.find_spec("triton"):

    @pytest.fixture(scope="module")
    def interpreted():
        return interpreted_results(__file__)

    @pytest.mark.parametrize("name", cases())
    def test_the_kernels_are_the_definition(interpreted, name):
        assert interpreted[name] < 1e-5


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpret_the_kernels()))
