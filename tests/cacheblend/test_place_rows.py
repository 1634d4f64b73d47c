"""The kernel that moves stored KV into pages: its PyTorch twin, and the Triton kernel against it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cacheblend.kernels.place_rows import StagedRows, place_rows_torch
from cacheblend.relocation import rotate_keys

LAYERS, HEADS, DIM, BLOCK = 3, 2, 16, 4


def case(seed: int, packed: bool, dim: int = DIM):
    """Two chunks of 5 and 7 tokens in one buffer, of which rows 1 to 4 and 0 to 6 are placed."""
    g = torch.Generator().manual_seed(seed)
    chunks = [torch.randn(LAYERS, 2, n, HEADS, dim, generator=g) for n in (5, 7)]
    buffer = torch.cat([chunk.reshape(-1) for chunk in chunks])
    rows = [torch.arange(1, 5), torch.arange(0, 6)]
    starts = [0, chunks[0].numel()]
    first = torch.cat([start + r * HEADS * dim for start, r in zip(starts, rows, strict=True)])
    kind = torch.cat([torch.full((len(r),), c.shape[2] * HEADS * dim) for c, r in zip(chunks, rows, strict=True)])
    angle = torch.randn(10, dim // 2, generator=g).repeat(1, 2)
    slots = torch.randperm(6 * BLOCK, generator=g)[:10]
    staged = StagedRows(first, 2 * kind, kind, angle.cos(), angle.sin(), slots)
    cache = torch.zeros(6, HEADS, BLOCK, 2 * dim) if packed else torch.zeros(6, 2, BLOCK, HEADS, dim)
    if packed:
        views = (cache[..., :dim].transpose(1, 2), cache[..., dim:].transpose(1, 2))
    else:
        views = (cache[:, 0], cache[:, 1])
    return chunks, rows, buffer, staged, views


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_rows_arrive_rotated_at_their_slots_and_nothing_else_is_touched(layer, packed):
    chunks, rows, buffer, staged, (keys, values) = case(layer, packed)
    place_rows_torch(buffer, layer, staged, keys, values)
    want_keys = torch.cat([chunk[layer, 0, r] for chunk, r in zip(chunks, rows, strict=True)])
    want_values = torch.cat([chunk[layer, 1, r] for chunk, r in zip(chunks, rows, strict=True)])
    block, offset = staged.slots // BLOCK, staged.slots % BLOCK
    assert torch.allclose(keys[block, offset], rotate_keys(want_keys, staged.cos, staged.sin), atol=1e-6)
    assert torch.equal(values[block, offset], want_values)
    untouched = torch.ones(6 * BLOCK, dtype=torch.bool)
    untouched[staged.slots] = False
    assert keys.reshape(6 * BLOCK, -1)[untouched].abs().max() == 0
    assert values.reshape(6 * BLOCK, -1)[untouched].abs().max() == 0


def compare_with_twin() -> None:
    """Runs in a process of its own, where Triton interprets its kernels."""
    from cacheblend.kernels.place_rows_triton import place_rows_triton

    for packed in (False, True):
        for dim in (16, 24):
            _, _, buffer, staged, views = case(7, packed, dim)
            twin = case(7, packed, dim)[4]
            place_rows_triton(buffer, 1, staged, *views)
            place_rows_torch(buffer, 1, staged, *twin)
            for got, want in zip(views, twin, strict=True):
                assert want.abs().max() > 0
                assert (got - want).abs().max() < 1e-6


def test_the_kernel_equals_its_twin():
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, __file__], check=True, env=env, timeout=120)


if __name__ == "__main__":
    compare_with_twin()
