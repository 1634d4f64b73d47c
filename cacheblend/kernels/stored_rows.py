"""Where rows of stored KV lie and go: a line a span, which kernels read, and what it says of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheblend.kernels.host_tables import empty_table, on_device
from cacheblend.ragged import places_within


class StoredSpan(NamedTuple):
    """Rows one after another, in memory and in a prompt: numbers, or the columns of several.

    A chunk lies in memory as [layers, 2, tokens, kv_heads, head_dim], contiguous, keys before values. Layers are placed
    in groups: a chunk that is copied to the device group by group has room there for a few layers, which groups use in
    turns; one that is on the device as a whole lies there with all its layers.

    Attributes:
        first: elements from the buffer's start to the first row's keys in the first layer that there is room for, or of
            the model where the whole chunk is on the device. May reach any memory of the device.
        turn_step: elements from one turn to the next; 0 where the whole chunk is on the device.
        model_step: elements from one of the model's layers to the next; 0 for chunks that take turns.
        layer_step: elements from one layer of a group to the next.
        kind_step: elements from a row's keys to its values.
        row_step: elements from one row to the next.
        old: position that the first row's key was encoded for.
        new: position that it is used at.
        rows: how many.
        blocks: where the blocks of its prompt begin in the table of all prompts.
    """

    first: Any
    turn_step: Any
    model_step: Any
    layer_step: Any
    kind_step: Any
    row_step: Any
    old: Any
    new: Any
    rows: Any
    blocks: Any


@dataclass(frozen=True, eq=False)
class StoredSpans:
    """Spans on the device.

    Attributes:
        table: [spans, 10] int64, a `StoredSpan` each.
        blocks: [n] int64, of all prompts one after another.
        longest: rows of the longest span.
    """

    table: torch.Tensor
    blocks: torch.Tensor
    longest: int

    @classmethod
    def on(cls, device: torch.device, spans: Sequence[StoredSpan], blocks: np.ndarray) -> StoredSpans:
        """Bring them to a device, for what is queued on the current stream afterwards.

        Args:
            device: where they are read.
            spans: of numbers, at least one.
            blocks: [n] int64.
        """
        told = len(spans) * len(StoredSpan._fields)
        host = empty_table(told + len(blocks), device=device)
        table = host.numpy()
        table[:told].reshape(len(spans), -1)[:] = spans
        table[told:] = blocks
        placed = on_device(host, device)
        return cls(placed[:told].view(len(spans), -1), placed[told:], max(span.rows for span in spans))


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The rows of some spans. Every attribute is [rows] int64; for what it says see `StoredSpan`.

    `slots` are where they go: block * block_size + offset.
    """

    first: torch.Tensor
    turn_step: torch.Tensor
    model_step: torch.Tensor
    layer_step: torch.Tensor
    kind_step: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    slots: torch.Tensor


def rows_of(spans: StoredSpans, block_size: int) -> StoredRows:
    """All rows of `spans`, in pages of `block_size` tokens."""
    lines = spans.table.cpu().numpy()
    counts = StoredSpan(*lines.T).rows
    within = places_within(counts)
    # Each row's span.
    of = StoredSpan(*np.repeat(lines.T, counts, axis=1))
    new = of.new + within
    slots = spans.blocks.cpu().numpy()[of.blocks + new // block_size] * block_size + new % block_size
    steps = (of.turn_step, of.model_step, of.layer_step, of.kind_step)
    columns = (of.first + within * of.row_step, *steps, of.old + within, new, slots)
    return StoredRows(*(torch.from_numpy(column).to(spans.table.device) for column in columns))
