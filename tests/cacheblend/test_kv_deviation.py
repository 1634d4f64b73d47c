"""The distance between new and stored KV: its twin on the CPU against the definition, and the Triton kernel.

Where triton is installed its interpreter runs the kernel itself, on the CPU and in a process of its own.
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

from kv_deviation_samples import Case, by_definition, deviation_case
from triton_interpreter import interpreted_results

from cacheblend.errors import BlendError
from cacheblend.kernels.kv_deviation import kv_deviation


def cases() -> dict[str, Case]:
    """Small, for the interpreter is slow."""
    return {
        "stacked pages": deviation_case(),
        "packed pages": deviation_case(layout="packed"),
        "pages apart": deviation_case(layout="apart"),
        "one row": deviation_case(1),
        "one head": deviation_case(kv_heads=1, head_dim=64),
        "heads no power of two": deviation_case(kv_heads=3, head_dim=24),
        "more elements than a block": deviation_case(4, kv_heads=10, head_dim=128),
        "block size no power of two": deviation_case(block_size=24),
        "float16": deviation_case(dtype=torch.float16),
    }


@pytest.mark.parametrize("name", cases())
def test_the_twin_is_the_definition(name):
    case = cases()[name]
    assert torch.allclose(kv_deviation(*case).double(), by_definition(*case), rtol=1e-5)


def test_no_rows_deviate_by_nothing():
    assert kv_deviation(*deviation_case(0)).shape == (0,)


def test_a_row_deviates_by_the_same_bits_whatever_rows_are_beside_it():
    keys, values, layer, slots = deviation_case()
    alone = kv_deviation(keys[3:5], values[3:5], layer, slots[3:5])
    assert torch.equal(kv_deviation(keys, values, layer, slots)[3:5], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda keys, values, layer, slots: (keys[1:], values, layer, slots), "one key and one value"),
        (lambda keys, values, layer, slots: (keys[:, :1], values[:, :1], layer, slots), "one key and one value"),
        (lambda keys, values, layer, slots: (keys.half(), values.half(), layer, slots), "as the cache's"),
        (lambda keys, values, layer, slots: (keys, values, layer, slots.int()), "int64 slots"),
        (lambda keys, values, layer, slots: (keys, values.mT.contiguous().mT, layer, slots), "has gaps"),
        (lambda keys, values, layer, slots: (keys, values, layer, slots.repeat_interleave(2)[::2]), "has gaps"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(BlendError, match=message):
        kv_deviation(*change(*deviation_case()))


def interpret_the_kernel() -> dict[str, float]:
    """Run in a process whose triton interprets: the largest relative error of each case."""
    from cacheblend.kernels.kv_deviation_triton import kv_deviation_triton

    errors = {}
    for name, case in cases().items():
        exact = by_definition(*case)
        errors[name] = float(((kv_deviation_triton(*case).double() - exact).abs() / exact).max())
    return errors


if importlib.util.find_spec("triton"):

    @pytest.fixture(scope="module")
    def interpreted():
        return interpreted_results(__file__)

    @pytest.mark.parametrize("name", cases())
    def test_the_kernel_is_the_definition(interpreted, name):
        assert interpreted[name] < 1e-5


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpret_the_kernel()))
