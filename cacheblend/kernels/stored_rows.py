"""Where rows of stored KV lie and go, span by span on the host and row by row on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from cacheblend.kernels.host_tables import empty_table, on_device
from cacheblend.kernels.place_rows import StoredRows
from cacheblend.ragged import places_within


class StoredSpan(NamedTuple):
    """Rows one after another, in memory and in a prompt.

    Attributes:
        first, turn_step, model_step, layer_step, kind_step, old, new: of the first row, as in `StoredRows`.
        row_step: elements from one row to the next.
        rows: how many.
        before: rows of the spans before it.
        blocks: where the blocks of its prompt begin in the table of all prompts.
    """

    first: int
    turn_step: int
    model_step: int
    layer_step: int
    kind_step: int
    old: int
    new: int
    row_step: int
    rows: int
    before: int
    blocks: int


def stored_rows(spans: np.ndarray, blocks: np.ndarray, block_size: int, device: torch.device) -> StoredRows:
    """All rows of `spans`.

    On a GPU what is brought there is a line a span: a table of all rows would take the host half a millisecond, for
    which the device waits.

    Args:
        spans: [spans, 11] int64, a `StoredSpan` each.
        blocks: [n] int64, of all prompts one after another.
        block_size: tokens of a block.
        device: where the rows are wanted.
    """
    if device.type != "cuda":
        return StoredRows(*torch.from_numpy(rows_of_spans(spans, blocks, block_size)).to(device))
    # Here, for triton is not installed where there is no GPU.
    from cacheblend.kernels.stored_rows_triton import rows_of_spans_triton

    # Both begin at multiples of 16 bytes, which Triton compiles for.
    first_block = spans.size + spans.size % 2
    host = empty_table(first_block + blocks.size, device=device)
    table = host.numpy()
    table[: spans.size], table[first_block:] = spans.ravel(), blocks
    placed = on_device(host, device)
    of_spans, of_blocks = placed[: spans.size], placed[first_block:]
    rows, longest = int(spans[:, 8].sum()), int(spans[:, 8].max(initial=0))
    return StoredRows(*rows_of_spans_triton(of_spans.view(spans.shape), of_blocks, block_size, rows, longest).unbind())


def rows_of_spans(spans: np.ndarray, blocks: np.ndarray, block_size: int) -> np.ndarray:
    """[8, rows] int64, the attributes of `StoredRows`; for the arguments see `stored_rows`."""
    counts = spans[:, 8]
    within = places_within(counts)
    rows = np.empty((8, len(within)), dtype=np.int64)
    rows[:7] = np.repeat(spans[:, :7].T, counts, axis=1)
    rows[0] += within * np.repeat(spans[:, 7], counts)
    rows[5:7] += within
    rows[7] = blocks[np.repeat(spans[:, 10], counts) + rows[6] // block_size] * block_size + rows[6] % block_size
    return rows
