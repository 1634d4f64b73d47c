"""Tables of the host's on the model's device: as they were, and the Triton kernel that reads them.

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

from triton_interpreter import interpreted_results

from cacheblend.kernels.host_tables import empty_table, on_device

CPU = torch.device("cpu")


def tables() -> dict[str, torch.Tensor]:
    return {
        "one number": torch.tensor([7]),
        "none": torch.empty(0, dtype=torch.int64),
        "several programs": torch.arange(5000).view(4, 1250),
        "int32": torch.arange(3000, dtype=torch.int32),
        "bool": torch.arange(1500) % 3 == 0,
    }


@pytest.mark.parametrize("name", tables())
def test_a_table_is_on_the_device_as_it_was(name):
    table = tables()[name]
    placed = on_device(table, CPU)
    assert (placed.dtype, placed.shape) == (table.dtype, table.shape)
    assert torch.equal(placed, table)


def test_a_new_table_has_the_shape_that_is_asked_for():
    assert empty_table(8, 3, device=CPU).shape == (8, 3)
    assert empty_table(5, device=CPU).dtype == torch.int64


def interpret_the_kernel() -> dict[str, bool]:
    """Run in a process whose triton interprets: whether each table is copied, and nothing behind it."""
    from cacheblend.kernels.host_tables_triton import read_table

    found = {}
    for name, table in tables().items():
        room = torch.zeros(table.numel() + 9, dtype=table.dtype)
        read_table(table, room[: table.numel()].view(table.shape))
        found[name] = torch.equal(room[: table.numel()], table.flatten()) and not room[table.numel() :].any()
    return found


if importlib.util.find_spec("triton"):

    @pytest.fixture(scope="module")
    def interpreted():
        return interpreted_results(__file__)

    @pytest.mark.parametrize("name", tables())
    def test_the_kernel_copies_a_table_and_nothing_behind_it(interpreted, name):
        assert interpreted[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpret_the_kernel()))
