"""Where rows of stored KV lie and go, span by span on the host and row by row on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from cacheblend.kernels.host_tables import empty_table, on_device
from cacheblend.kernels.place_rows import StoredRows
from cacheblend.ragged import places_within


class StoredSpan(NamedTuple):
    """Rows one after another, in memory and in a prompt: numbers, or the columns of several.

    Attributes:
        first, turn_step, model_step, layer_step, kind_step, old, new: of the first row, as in `StoredRows`.
        row_step: elements from one row to the next.
        rows: how many.
        before: rows of the spans before it.
        blocks: where the blocks of its prompt begin in the table of all prompts.
    """

    first: Any
    turn_step: Any
    model_step: Any
    layer_step: Any
    kind_step: Any
    old: Any
    new: Any
    row_step: Any
    rows: Any
    before: Any
    blocks: Any


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
    counts = StoredSpan(*spans.T).rows
    rows, longest = int(counts.sum()), int(counts.max(initial=0))
    return StoredRows(*rows_of_spans_triton(of_spans.view(spans.shape), of_blocks, block_size, rows, longest).unbind())


def rows_of_spans(spans: np.ndarray, blocks: np.ndarray, block_size: int) -> np.ndarray:
    """[8, rows] int64, the attributes of `StoredRows`; for the arguments see `stored_rows`."""
    counts = StoredSpan(*spans.T).rows
    within = places_within(counts)
    # Each row's span, and the row itself within it.
    of = StoredSpan(*np.repeat(spans.T, counts, axis=1))
    new = of.new + within
    slots = blocks[of.blocks + new // block_size] * block_size + new % block_size
    steps = (of.turn_step, of.model_step, of.layer_step, of.kind_step)
    return np.stack([of.first + within * of.row_step, *steps, of.old + within, new, slots])
