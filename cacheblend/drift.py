"""Drift: how far a chunk's KV moves by standing in a prompt, told by the rows that are recomputed there.

Stored KV was computed without the passages that now precede the chunk. Where a selector has some rows recomputed, their
new keys and values are known beside the stored ones, at every layer; the difference is their drift. Rows of a chunk
drift alike, near ones most: a row that is left alone is moved by the weighted mean drift of its chunk's recomputed rows

    moved[t] = stored[t] + sum_s w(t, s) (new[s] - stored[s]) / (sum_s w(t, s) + PRIOR)
    w(t, s) = exp(-|t - s| / REACH)

of values, and of keys as they are before rotation. `PRIOR` is the weight of no drift at all: far from any recomputed
row little is moved. The idea of correcting the rows left alone is this project's; the numbers were found on
calibration data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from cacheblend.plan import BlendPlan, Span
from cacheblend.relocation import RotaryTables, rotate_keys, unrotate_keys

REACH = 8.0
"""Rows within which drift is alike."""
PRIOR = 0.3
"""Weight of no drift."""


class ChunkRows(NamedTuple):
    """The rows of one chunk of a prompt that is partly recomputed, on the host.

    Attributes:
        span: where it is in the prompt.
        rows: its recomputed rows, a slice of the positions it was made from.
        told: [m] int64, positions of these.
        left: [n] int64, positions of its other rows.
    """

    span: Span
    rows: slice
    told: np.ndarray
    left: np.ndarray


@dataclass(frozen=True, eq=False)
class ChunkDrift:
    """One chunk of `ChunkRows`, with its positions where the model is."""

    rows: slice
    told: torch.Tensor
    left: torch.Tensor

    @cached_property
    def weights(self) -> torch.Tensor:
        """[n, m] float32: the share of each recomputed row's drift that each other row moves by."""
        return drift_weights(self.left, self.told)

    def shift(self, drift: torch.Tensor) -> torch.Tensor:
        """How far the rows left alone move.

        Args:
            drift: [m, kv_heads, head_dim] float32, of the recomputed rows.

        Returns:
            [n, kv_heads, head_dim] float32.
        """
        return torch.einsum("nm,mhd->nhd", self.weights, drift)


def chunk_rows(plan: BlendPlan, positions: np.ndarray) -> list[ChunkRows]:
    """The chunks of a plan that have recomputed rows and others.

    Args:
        plan: the prompt; rows outside its reused spans tell nothing and are not moved.
        positions: [rows] int64 ascending, the rows of the pass.
    """
    # In numpy, whose small operations cost a tenth of torch's: on a GPU it is what the device waits for.
    alone = np.ones(plan.length, dtype=bool)
    alone[positions] = False
    left = np.flatnonzero(alone)
    borders = np.searchsorted(positions, [(span.start, span.end) for span in plan.reused])
    return [
        # As many rows of the prompt as come before a border, less the recomputed ones, are left alone before it.
        ChunkRows(span, slice(first, last), positions[first:last], left[span.start - first : span.end - last])
        for span, (first, last) in zip(plan.reused, borders.tolist(), strict=True)
        if 0 < last - first < span.length
    ]


def chunk_drifts(plan: BlendPlan, positions: torch.Tensor) -> list[ChunkDrift]:
    """`chunk_rows` with tensors, where `positions` ([rows] int64 ascending) are."""
    return [
        ChunkDrift(chunk.rows, positions[chunk.rows], torch.from_numpy(chunk.left).to(positions.device))
        for chunk in chunk_rows(plan, positions.cpu().numpy())
    ]


def drift_weights(left: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
    """[n, m] float32 weights of a chunk's rows `left` ([n] int64 positions) and its recomputed rows `told` ([m])."""
    near = torch.exp(-(left[:, None] - told[None, :]).abs() / REACH)
    return near / (near.sum(1, keepdim=True) + PRIOR)


def key_shift(drift: ChunkDrift, difference: torch.Tensor, tables: RotaryTables, scaling: float) -> torch.Tensor:
    """How far the rotated keys of a chunk's rows that are left alone move.

    Args:
        drift: of the chunk.
        difference: [m, kv_heads, head_dim] float32, new less stored keys of its recomputed rows, both rotated.
        tables: the model's rotary tables.
        scaling: the factor they carry.

    Returns:
        [n, kv_heads, head_dim] float32.
    """
    plain = unrotate_keys(difference, tables, drift.told, scaling)
    return rotate_keys(drift.shift(plain), *tables(drift.left))
