"""The Triton kernel of `on_device`."""

# Kernels take pointers and numbers that only Triton types.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_ELEMENTS = 1024
"""Elements that one program copies."""


@triton.jit(do_not_specialize=["table", "placed", "elements"])
def _read(table, placed, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(placed + at, tl.load(table + at, at < elements, 0), at < elements)


_compiled: dict[torch.dtype, Any] = {}


def read_table(table: torch.Tensor, placed: torch.Tensor) -> None:
    """Copy `table` to `placed`, of the same form, on the current stream.

    Args:
        table: page-locked, contiguous.
        placed: on a GPU.
    """
    elements = table.numel()
    if not elements:
        return
    grid = (triton.cdiv(elements, _ELEMENTS), 1, 1)
    found = _compiled.get(table.dtype)
    if found is not None:
        # Without a search for the binary, which takes longer than the launch (`LayerLaunch`).
        found[grid](table, placed, elements, _ELEMENTS)
        return
    found = _read[grid](table, placed, elements, _ELEMENTS)
    # Triton's interpreter compiles nothing that could be kept.
    if found is not None:
        _compiled[table.dtype] = found
