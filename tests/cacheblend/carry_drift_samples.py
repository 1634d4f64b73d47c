"""Chunks of a prompt that are partly recomputed, over a paged cache, on any device, and where their rows move to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rows_attention_samples import empty_pages

from cacheblend.drift import PRIOR, REACH
from cacheblend.kernels.carry_drift import ChunkRange, DriftingRows, DriftTable, KeysValues, moved_rows
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.place_rows import Rotations

SCALING = 1.25
"""As YaRN has."""


@dataclass(frozen=True, eq=False)
class DriftCase:
    """What `DriftPass.move` takes, and the slots of its rows that move."""

    keys: torch.Tensor
    values: torch.Tensor
    layer: PagedLayer
    rows: DriftingRows
    rotations: Rotations
    more: KeysValues | None

    def turns(self, positions: torch.Tensor) -> KeysValues:
        """(cos, sin), each [n, head_dim]."""
        cos, sin = self.rotations.cos[positions], self.rotations.sin[positions]
        return torch.cat([cos, cos], 1), torch.cat([sin, sin], 1)

    def stored(self, slots: torch.Tensor) -> KeysValues:
        """Keys and values at `slots`."""
        at = slots // self.layer.block_size, slots % self.layer.block_size
        return self.layer.keys[at], self.layer.values[at]


def drift_case(
    chunks: tuple[tuple[int, int], ...] = ((20, 3), (9, 2), (90, 40)),
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 8,
    layout: str = "stacked",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    more: int = 0,
) -> DriftCase:
    """Chunks of (rows, rows that tell); `more` of each chunk's were computed by an earlier pass."""
    g = torch.Generator().manual_seed(len(chunks) + kv_heads)
    length = sum(rows for rows, _ in chunks)
    blocks = 2 + -(-length // block_size)
    layer = empty_pages(layout, blocks, block_size, kv_heads, head_dim, dtype, device)
    slots = torch.randperm(blocks * block_size, generator=g)[:length]
    at = (slots // block_size).to(device), (slots % block_size).to(device)
    for pages in (layer.keys, layer.values):
        pages[at] = torch.randn(length, kv_heads, head_dim, generator=g).to(device, dtype)
    ranges: list[ChunkRange] = []
    of_pass, places, told, left = [], [], [], []
    first = 0
    for rows, telling in chunks:
        drawn = torch.randperm(rows, generator=g)
        tell, move = first + drawn[:telling].sort().values, first + drawn[telling:].sort().values
        start_left, start_told = sum(map(len, left)), sum(map(len, told))
        ranges.append(ChunkRange(start_left, start_left + len(move), start_told, start_told + telling))
        of_pass.append(tell[more:])
        places.append(torch.arange(start_told, start_told + telling - more))
        told += [tell[more:], tell[:more]]
        left.append(move)
        first += rows
    index = torch.cat(of_pass)
    # Rows of other prompts stand before and between those of the pass.
    width, count = kv_heads * head_dim, 2 * len(index) + 1
    table = DriftTable.of(
        ranges,
        *([column.numpy()] for column in (torch.arange(len(index)) * 2 + 1, slots[index], torch.cat(places))),
        *([column.numpy()] for column in (torch.cat(told), slots[torch.cat(left)], torch.cat(left))),
    )
    rows = DriftingRows.on(torch.device(device), table)
    projected = torch.randn(count, 5 * width, generator=g).to(device, dtype)
    keys, values = (projected[:, at * width : (at + 1) * width].view(count, kv_heads, head_dim) for at in (3, 4))
    angles = torch.arange(length)[:, None] / torch.logspace(0, 3, head_dim // 2)
    rotations = Rotations(*((SCALING * part).to(device) for part in (angles.cos(), angles.sin())), SCALING)
    extra = more * len(chunks)
    drift = [torch.randn(extra, kv_heads, head_dim, generator=g).to(device) for _ in range(2)] if more else None
    return DriftCase(keys.contiguous(), values, layer, rows, rotations, (drift[0], drift[1]) if drift else None)


def by_twin(case: DriftCase) -> KeysValues:
    """Where the rows move to, by `moved_rows`."""
    rows = case.rows
    return moved_rows(
        rows,
        (case.turns(rows.told_positions), case.turns(rows.left_positions)),
        SCALING,
        (case.keys[rows.of_pass], case.values[rows.of_pass]),
        case.stored(rows.of_pass_slots),
        case.stored(rows.left_slots),
        case.more,
    )


def by_definition(case: DriftCase) -> tuple[torch.Tensor, torch.Tensor]:
    """One row after another, in float64: [n, kv_heads, head_dim] keys and values of the rows that move."""
    rows, half = case.rows, case.layer.head_dim // 2
    told: list[tuple[torch.Tensor, torch.Tensor]] = [None] * len(rows.told_positions)  # type: ignore[list-item]

    def turned(key: torch.Tensor, position: int, sign: float, norm: float) -> torch.Tensor:
        c, s = case.rotations.cos[position].double() / norm, sign * case.rotations.sin[position].double() / norm
        return torch.cat([key[:, :half] * c - key[:, half:] * s, key[:, half:] * c + key[:, :half] * s], 1)

    old_keys, old_values = case.stored(rows.of_pass_slots)
    for n, (index, place) in enumerate(zip(rows.of_pass.tolist(), rows.of_pass_at.tolist(), strict=True)):
        key = case.keys[index].double() - old_keys[n].double()
        plain = turned(key, int(rows.told_positions[place]), -1.0, SCALING**2)
        told[place] = plain, case.values[index].double() - old_values[n].double()
    others = iter(() if case.more is None else zip(*case.more, strict=True))
    told = [entry if entry is not None else tuple(part.double() for part in next(others)) for entry in told]

    keys, values = (part.double() for part in case.stored(rows.left_slots))
    for chunk in rows.chunks:
        for row in range(chunk.left, chunk.left_end):
            position = int(rows.left_positions[row])
            weights = {
                place: float(torch.exp(torch.tensor(-abs(position - int(rows.told_positions[place])) / REACH).double()))
                for place in range(chunk.told, chunk.told_end)
            }
            share = sum(weights.values()) + PRIOR
            keys[row] += turned(sum(w * told[place][0] for place, w in weights.items()) / share, position, 1.0, 1.0)
            values[row] += sum(w * told[place][1] for place, w in weights.items()) / share
    return keys, values
