"""A program: what Triton hands to a GPU's driver for the layers of several passes, by `LayerLaunch` and by itself.

Its compiler and launcher are real; the driver is a stand-in that writes down what it is handed.
"""

# Kernels take pointers and numbers that only Triton types.
# mypy: allow-untyped-defs

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from cacheblend.kernels.layer_launch import LayerLaunch

launched: list[tuple[str, ...]] = []
TURNS = (0, 1, 16)
"""Numbers that change from layer to layer, some of which Triton would compile in if it were let."""


class Launcher:
    """Writes down what one binary is launched with."""

    def __init__(self, *_source: object) -> None: ...

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        """Behind the function stand its metadata, those of the launch, and two hooks."""
        handed = (hex(a.data_ptr()) if isinstance(a, torch.Tensor) else repr(a) for a in rest[4:])
        launched.append((str((x, y, z, stream)), function, str(rest[0]), *handed))


class Driver:
    """Of an H100 that is not there."""

    launcher_cls = Launcher

    @property
    def utils(self) -> Driver:
        """What loads binaries."""
        return self

    def load_binary(self, name: str, *_binary: object) -> tuple[int, str, int, int, int]:
        """Module, function, registers, spills and most threads."""
        return 1, name, 32, 0, 1024

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Only what is looked at."""
        return {"max_shared_mem": 1 << 17}

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Any number."""
        return 7


@triton.jit(do_not_specialize=["turn", "rows"])
def scale_kernel(out, elements, turn, table, factor, one, sixteen, rows, BLOCK: tl.constexpr):
    """Has arguments that Triton compiles in, that it notes a divisor of, and whose value it does not look at."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(elements + at * one, at < rows * sixteen, 0.0)
    tl.store(out + at, found * factor + tl.load(table) + turn, at < rows * sixteen)


class Counted:
    """A kernel whose ordinary launches are counted."""

    params = scale_kernel.params

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        self.launches += 1
        return scale_kernel[grid]


def main() -> None:
    """Launch both ways, and print what the driver was handed."""
    driver.set_active(Driver())
    room, table = torch.zeros(4, 64), torch.zeros(1)
    kernel = Counted()
    looked_up, launches = [], passes(table)
    for grid, fixed, warps in launches:
        launch = LayerLaunch(kernel, grid, *fixed, num_warps=warps)
        for layer, turn in zip(room[:3], TURNS, strict=True):
            launch(layer, room[3], turn)
        looked_up.append(kernel.launches)
    ours = launched.copy()
    launched.clear()
    for grid, fixed, warps in launches:
        for layer, turn in zip(room[:3], TURNS, strict=True):
            scale_kernel[grid](layer, room[3], turn, *fixed, num_warps=warps)
    print(json.dumps([ours, launched, looked_up]))


def passes(table: torch.Tensor) -> list[tuple[tuple[int, int, int], tuple[Any, ...], int]]:
    """Grids, arguments and warps: the same kind again on another grid, then kinds that Triton compiles anew for."""
    grid = (5, 2, 1)
    return [
        (grid, (table, 3.5, 1, 16, 1, 32), 2),
        ((4, 1, 1), (table, 4.5, 1, 32, 7, 32), 2),
        (grid, (table, 3.5, 3, 16, 1, 32), 2),
        (grid, (table, 3.5, 1, 17, 1, 32), 2),
        (grid, (table, 3.5, 1, 16, 1, 64), 2),
        (grid, (table, 3.5, 1, 16, 1, 32), 4),
        (grid, (table, 3.5, 1, 16, 1 << 33, 32), 4),
        (grid, (table.double(), 3.5, 1, 16, 1, 32), 2),
    ]


if __name__ == "__main__":
    main()
