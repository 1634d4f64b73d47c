"""Launching a kernel for one layer after another: forms of tensors, and what reaches the device.

Where triton is installed, its own compiler and launcher run in a process of their own; only the driver is a stand-in
that writes down what it is handed, so that no GPU is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cacheblend.kernels.layer_launch import form_of


def rows(first: int = 0) -> torch.Tensor:
    """[4, 8] float32 whose address is a multiple of 64, and `first` elements behind one."""
    room = torch.zeros(64)
    start = -room.data_ptr() // 4 % 16 + first
    return room[start : start + 32].view(4, 8)


def test_tensors_of_equal_form_may_take_one_anothers_place():
    assert form_of(rows(), rows(4)) == form_of(rows(8), rows())


@pytest.mark.parametrize("other", [rows(1), rows()[:3], rows().T.contiguous().T, rows().to(torch.int32)])
def test_address_shape_strides_and_dtype_make_another_form(other):
    assert form_of(rows()) != form_of(other)


if importlib.util.find_spec("triton"):

    def test_every_layer_is_launched_as_triton_itself_would_launch_it_and_looked_up_once_a_kind():
        program = Path(__file__).parent / "launches_without_device.py"
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        ours, of_triton, looked_up = json.loads(done.stdout)
        assert ours == of_triton
        assert len({str(launch) for launch in ours}) == 24
        assert looked_up == [1, 1, 2, 3, 4, 5, 6, 7]
