"""The kernel that moves stored KV into pages: its PyTorch twin, and the Triton kernel against it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.kernels.place_rows import LayersPages, PlacePass, Rotations
from cacheblend.kernels.stored_rows import StoredSpan, StoredSpans, rows_of
from cacheblend.relocation import rotate_keys, rotation_between

LAYERS, HEADS, DIM, BLOCK, GROUP, POSITIONS = 5, 2, 16, 4, 2, 60
LENGTHS = (5, 23)
ROWS = (range(1, 5), range(20))
BASES = (3, 0)
STARTS = (3, 11)
"""The first chunk stays where it was encoded; the second takes more than one tile of rows."""
BLOCKS = 12


class Case:
    """Two chunks of two prompts, some rows of each; the second is on the device as a whole."""

    def __init__(self, seed: int, packed: bool, dim: int = DIM, scaling: float = 1.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.chunks = [torch.randn(LAYERS, 2, n, HEADS, dim, generator=g) for n in LENGTHS]
        staged, resident = self.chunks
        per_layer = [chunk[0].numel() for chunk in self.chunks]
        half = GROUP * per_layer[0]
        memory = torch.zeros(2 * half + resident.numel())
        self.buffer, memory[2 * half :] = memory[: 2 * half], resident.reshape(-1)
        self.half = half
        self.staged = staged
        angle = torch.arange(POSITIONS)[:, None] * torch.rand(dim // 2, generator=g)
        self.rotations = Rotations(scaling * angle.cos(), scaling * angle.sin(), scaling)
        row = HEADS * dim
        spans = [
            StoredSpan(
                first=(2 * half if index else 0) + rows[0] * row,
                turn_step=0 if index else half,
                model_step=per_layer[1] if index else 0,
                layer_step=per_layer[index],
                kind_step=per_layer[index] // 2,
                row_step=row,
                old=base + rows[0],
                new=start + rows[0],
                rows=len(rows),
                blocks=3 * index,
            )
            for index, (rows, base, start) in enumerate(zip(ROWS, BASES, STARTS, strict=True))
        ]
        blocks = torch.randperm(BLOCKS, generator=g).numpy()
        self.spans = StoredSpans.on(torch.device("cpu"), spans, blocks)
        self.rows = rows_of(self.spans, BLOCK)
        shape = (BLOCKS, HEADS, BLOCK, 2 * dim) if packed else (BLOCKS, 2, BLOCK, HEADS, dim)
        self.cache = torch.zeros(LAYERS, *shape)
        layers = [
            (c[..., :dim].transpose(1, 2), c[..., dim:].transpose(1, 2)) if packed else (c[:, 0], c[:, 1])
            for c in self.cache
        ]
        self.views = layers
        offsets = torch.arange(LAYERS) * self.cache[0].numel()
        self.pages = LayersPages(*layers[0], offsets)

    def place_all(self, place_pass=PlacePass) -> None:
        """Group after group, as the stages do: each copied into the buffer whose turn it is."""
        places = place_pass(self.buffer, self.spans, self.pages, self.rotations)
        for group, first in enumerate(range(0, LAYERS, GROUP)):
            part = self.staged[first : first + GROUP]
            turn = group % 2 * self.half
            self.buffer[turn : turn + part.numel()] = part.reshape(-1)
            places.place(group % 2, first, len(part))

    def expected(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys rotated by the project's own relocation, and values, of the placed rows."""

        def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.rotations.cos[positions].repeat(1, 2), self.rotations.sin[positions].repeat(1, 2)

        rotation = rotation_between(tables, self.rows.old, self.rows.new, self.rotations.scaling)
        keys, values = (
            torch.cat([chunk[layer, kind, list(rows)] for chunk, rows in zip(self.chunks, ROWS, strict=True)])
            for kind in (0, 1)
        )
        return rotate_keys(keys, *rotation), values


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_arrive_rotated_at_their_slots_and_nothing_else_is_touched(packed, scaling):
    case = Case(3, packed, scaling=scaling)
    case.place_all()
    block, offset = case.rows.slots // BLOCK, case.rows.slots % BLOCK
    untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    untouched[case.rows.slots] = False
    for layer, (keys, values) in enumerate(case.views):
        want_keys, want_values = case.expected(layer)
        assert torch.allclose(keys[block, offset], want_keys, atol=1e-5)
        assert torch.equal(values[block, offset], want_values)
        assert keys.reshape(BLOCKS * BLOCK, -1)[untouched].abs().max() == 0
        assert values.reshape(BLOCKS * BLOCK, -1)[untouched].abs().max() == 0


def test_a_key_that_stays_is_copied_bit_for_bit():
    case = Case(5, packed=False)
    case.place_all()
    stays = case.rows.old == case.rows.new
    assert stays.sum() == len(ROWS[0])
    slots = case.rows.slots[stays]
    assert torch.equal(case.views[2][0][slots // BLOCK, slots % BLOCK], case.chunks[0][2, 0, list(ROWS[0])])


def compare_with_twin() -> None:
    """Runs in a process of its own, where Triton interprets its kernels."""
    from cacheblend.kernels.place_rows_triton import PlaceLaunches

    for packed in (False, True):
        for dim in (16, 24):
            case, twin = Case(7, packed, dim), Case(7, packed, dim)
            case.place_all(PlaceLaunches)
            twin.place_all()
            assert twin.cache.abs().max() > 0
            assert (case.cache - twin.cache).abs().max() < 1e-6
    place_from_the_pool(PlaceLaunches)


def place_from_the_pool(launches: Any) -> None:
    """Whole chunks in memory of their own, counted from the pages: rows of all lengths beside a tile's."""
    g = torch.Generator().manual_seed(9)
    lengths, bases, starts, blocks = (16, 33, 15, 1), (0, 5, 60, 2), (3, 20, 60, 80), 24
    cache = torch.zeros(LAYERS, blocks, 2, BLOCK, HEADS, DIM)
    pages = LayersPages(cache[0][:, 0], cache[0][:, 1], torch.arange(LAYERS) * cache[0].numel())
    angle = torch.arange(100)[:, None] * torch.rand(DIM // 2, generator=g)
    rotations = Rotations(angle.cos(), angle.sin(), 1.0)
    chunks = [torch.randn(LAYERS, 2, length, HEADS, DIM, generator=g) for length in lengths]
    row = HEADS * DIM
    spans = [
        StoredSpan(
            first=(chunk.data_ptr() - cache.data_ptr()) // 4,
            turn_step=0,
            model_step=2 * length * row,
            layer_step=2 * length * row,
            kind_step=length * row,
            row_step=row,
            old=base,
            new=start,
            rows=length,
            blocks=0,
        )
        for chunk, length, base, start in zip(chunks, lengths, bases, starts, strict=True)
    ]
    table = torch.randperm(blocks, generator=g)
    told = StoredSpans.on(torch.device("cpu"), spans, table.numpy())
    launches(pages.keys, told, pages, rotations).place(0, 0, LAYERS)
    filled = torch.zeros(blocks * BLOCK, dtype=torch.bool)
    for chunk, length, base, start in zip(chunks, lengths, bases, starts, strict=True):
        old, new = torch.arange(base, base + length), torch.arange(start, start + length)
        slots = table[new // BLOCK] * BLOCK + new % BLOCK
        filled[slots] = True
        rotation = rotation_between(
            lambda at: (rotations.cos[at].repeat(1, 2), rotations.sin[at].repeat(1, 2)), old, new, 1.0
        )
        for layer in range(LAYERS):
            keys, values = (cache[layer][:, kind].reshape(-1, HEADS, DIM)[slots] for kind in (0, 1))
            assert torch.allclose(keys, rotate_keys(chunk[layer, 0], *rotation), atol=1e-5)
            assert torch.equal(values, chunk[layer, 1])
    assert cache.transpose(2, 3).reshape(LAYERS, blocks * BLOCK, -1)[:, ~filled].abs().max() == 0


def test_the_kernel_equals_its_twin():
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, __file__], check=True, env=env, timeout=120)


if __name__ == "__main__":
    compare_with_twin()
