"""Rows of several prompts as one batch: ids, positions, slots, and the runs they fall into."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch

from cacheblend.kernels.host_tables import empty_table, on_device

FEW_IDS = 256
"""Ids that are sooner picked from a prompt one by one than from a table of all that has to be made first."""
NO_SLOT = -1
"""vLLM's own mark for a row whose KV is not written."""


@dataclass(frozen=True, eq=False)
class PromptPages:
    """A prompt and the pages it owns.

    Attributes:
        ids: the prompt's token ids.
        block_ids: [blocks] int64 on the CPU.
        block_size: tokens of a block.
    """

    ids: Sequence[int]
    block_ids: torch.Tensor
    block_size: int

    @classmethod
    def of(cls, token_ids: Sequence[int], block_ids: Sequence[int], block_size: int) -> PromptPages:
        """From plain numbers."""
        return cls(token_ids, _tensor_of(block_ids), block_size)

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """[n] int64 on the CPU; made when it is first wanted, or by `make_tables`."""
        return _tensor_of(self.ids)

    def make_tables(self) -> None:
        """Have what is looked up by position ready, while there is time."""
        _ = self.token_ids, self.all_slots

    def ids_at(self, places: np.ndarray) -> np.ndarray | list[int]:
        """[n] token ids at `places` ([n] int64)."""
        if len(places) > FEW_IDS:
            return self.token_ids.numpy().take(places)
        return [self.ids[place] for place in places.tolist()]

    @property
    def rows(self) -> int:
        """Rows the pages have room for."""
        return len(self.block_ids) * self.block_size

    @cached_property
    def all_slots(self) -> torch.Tensor:
        """[rows] int64 on the CPU: each position's slot; one table, so that spans of positions are slices of it."""
        slots = self.block_ids.numpy()[:, None] * self.block_size + np.arange(self.block_size)
        return torch.from_numpy(slots.ravel())

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """[n] int64 slots of `positions` ([n] int64), both on the CPU."""
        # In numpy, whose small operations cost a tenth of torch's: on a GPU it is what the device waits for.
        return torch.from_numpy(self.all_slots.numpy().take(positions.numpy()))


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Some rows of one prompt.

    Attributes:
        prompt: whose.
        positions: [n] int64 ascending, on the CPU.
        paged: [n] bool on the CPU, False where a row's KV goes to no page; None where all do.
    """

    prompt: PromptPages
    positions: torch.Tensor
    paged: torch.Tensor | None = None

    def cut(self, first: int, last: int) -> PromptRows:
        """The rows from index `first` to `last` (exclusive)."""
        if last - first == len(self.positions):
            return self
        paged = None if self.paged is None else self.paged[first:last]
        return PromptRows(self.prompt, self.positions[first:last], paged)

    def slots(self) -> torch.Tensor:
        """[n] int64 slots, `NO_SLOT` for rows without a page."""
        if self.paged is None:
            return self.prompt.slots(self.positions)
        # In numpy: see `PromptPages.slots`.
        positions, paged = self.positions.numpy(), np.flatnonzero(self.paged.numpy())
        slots = np.full(len(positions), NO_SLOT)
        slots[paged] = self.prompt.all_slots.numpy().take(positions[paged])
        return torch.from_numpy(slots)


class RowBatch:
    """Rows of several prompts, one prompt after another, on the model's device.

    Args:
        parts: each prompt's rows, none empty.
        device: of the model.
    """

    def __init__(self, parts: Sequence[PromptRows], device: torch.device) -> None:
        self.parts = tuple(parts)
        self.device = device
        self._edges = tuple(accumulate((len(part.positions) for part in self.parts), initial=0))

    def __len__(self) -> int:
        return self._edges[-1]

    def __iter__(self) -> Iterator[tuple[PromptRows, slice]]:
        for part, (first, last) in zip(self.parts, pairwise(self._edges), strict=True):
            yield part, slice(first, last)

    @cached_property
    def _on_host(self) -> torch.Tensor:
        """[4, rows] int64: position, token id, slot and part of each row."""
        # Filled where the copy to the device starts from, and in numpy: see `PromptPages.slots`.
        table = empty_table(4, len(self), device=self.device)
        columns = table.numpy()
        for index, (part, where) in enumerate(self):
            rows, positions = columns[:, where], part.positions.numpy()
            rows[0] = positions
            rows[1] = part.prompt.token_ids.numpy().take(positions)
            rows[2] = part.slots().numpy()
            rows[3] = index
        return table

    @cached_property
    def _on_device(self) -> tuple[torch.Tensor, ...]:
        """Four times [rows] int64, one copy to the device for all that a row is."""
        return on_device(self._on_host, self.device).unbind()

    @cached_property
    def positions_cpu(self) -> torch.Tensor:
        """[rows] int64 on the CPU."""
        return self._on_host[0]

    @property
    def positions(self) -> torch.Tensor:
        """[rows] int64."""
        return self._on_device[0]

    @property
    def token_ids(self) -> torch.Tensor:
        """[rows] int64."""
        return self._on_device[1]

    @property
    def slots(self) -> torch.Tensor:
        """[rows] int64."""
        return self._on_device[2]

    @property
    def prompt_index(self) -> torch.Tensor:
        """[rows] int64: which part each row belongs to."""
        return self._on_device[3]

    @cached_property
    def prompt_index_cpu(self) -> torch.Tensor:
        """[rows] int64 on the CPU: which part each row belongs to."""
        return self._on_host[3]

    @cached_property
    def block_tables_cpu(self) -> torch.Tensor:
        """[parts, blocks] int32 on the CPU, padded with block 0."""
        blocks = [part.prompt.block_ids.numpy() for part in self.parts]
        tables = empty_table(len(blocks), max(map(len, blocks)), device=self.device, dtype=torch.int32)
        for table, own in zip(tables.numpy(), blocks, strict=True):
            table[: len(own)] = own
            table[len(own) :] = 0
        return tables

    @cached_property
    def run_starts(self) -> torch.Tensor:
        """[runs] int64 on the CPU: index of the first row of each maximal run of consecutive positions of a prompt."""
        # In numpy: see `PromptPages.slots`.
        position, prompt = self.positions_cpu.numpy(), self.prompt_index_cpu.numpy()
        breaks = (np.diff(position) != 1) | (np.diff(prompt) != 0)
        return torch.from_numpy(np.append(0, np.flatnonzero(breaks) + 1))


def _tensor_of(numbers: Sequence[int]) -> torch.Tensor:
    """[n] int64 on the CPU."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64)
    # Packing takes thousands of numbers from a tuple twenty times faster than a tensor does.
    packed = bytearray(struct.Struct(f"{len(numbers)}q").pack(*numbers))
    return torch.frombuffer(packed, dtype=torch.int64)


def slices(
    parts: Sequence[PromptRows], most: int, together: Mapping[int, Sequence[tuple[int, int]]] | None = None
) -> list[list[tuple[int, PromptRows]]]:
    """Cut a batch into pieces of at most `most` rows, in order.

    Args:
        parts: the batch.
        most: rows of a piece.
        together: by a part's index, rows that are not cut apart: from one index to another (exclusive), ascending. If
            they alone are more than `most`, they are a piece of their own.

    Returns:
        For each piece, (index of the part, its rows) pairs; parts without rows are left out.
    """
    pieces: list[list[tuple[int, PromptRows]]] = []
    room = 0
    for index, part in enumerate(parts):
        groups = () if together is None else together.get(index, ())
        first, count = 0, len(part.positions)
        while first < count:
            if room <= 0:
                pieces.append([])
                room = most
            last = min(count, first + room)
            start, end = next(((a, b) for a, b in groups if a < last < b), (last, last))
            if start <= first < end:
                if room < most:
                    room = 0
                    continue
                last = end
            else:
                last = start
            pieces[-1].append((index, part.cut(first, last)))
            room -= last - first
            first = last
    return pieces
