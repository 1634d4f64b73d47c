"""Stored chunk KV, moved to where prompts use it and written into their pages, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch

from cacheblend.kernels.place_rows import LayersPages, StoredRows, place_rows
from cacheblend.plan import Span
from cacheblend.relocation import rotate_keys
from cacheblend.vllm_backend.forward import LayersForward
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rotary import RotaryTables
from cacheblend.vllm_backend.rows import PromptPages
from kvstore.chunk import ChunkKV

LAYERS_TOGETHER = 4
"""Layers that are copied to the GPU with one call a chunk, at most."""


@dataclass(frozen=True, eq=False)
class PlacedSpan:
    """A reused span of a prompt, and the chunk that fills it.

    Attributes:
        prompt: whose pages.
        span: the rows.
        start: the first row to write; those before it are there already.
        chunk: stored KV of the whole span.
    """

    prompt: PromptPages
    span: Span
    start: int
    chunk: ChunkKV

    @property
    def rows(self) -> slice:
        """The rows to write, counted within the chunk."""
        return slice(self.start - self.span.start, self.span.length)

    @property
    def length(self) -> int:
        """How many rows are written."""
        return self.span.end - self.start


class LayerPlacement(Protocol):
    """Writes each layer's chunk KV into the pages when a pass first comes to that layer."""

    def is_due(self, layer: int) -> bool:
        """Whether a layer up to `layer` is not written yet."""
        ...

    def ensure(self, layer: int) -> None:
        """Write every layer up to `layer` that is not written yet."""
        ...


def place_layers(spans: Sequence[PlacedSpan], forward: LayersForward, rotary: RotaryTables) -> LayerPlacement:
    """How `spans` get into the pages of each layer.

    Args:
        spans: what to write; none empty.
        forward: knows the pages and the device.
        rotary: of the model.
    """
    if spans and forward.device.type == "cuda" and forward.pages[0].views is not None:
        return StagedPlacement(spans, forward.layers_pages, rotary, forward.device, forward.staging_stream)
    return PlainPlacement(spans, forward.pages, rotary, forward.device)


class PlainPlacement:
    """Rotates with PyTorch and writes through the engine's backend: right for every layout and device."""

    def __init__(
        self, spans: Sequence[PlacedSpan], pages: Sequence[LayerPages], rotary: RotaryTables, device: torch.device
    ) -> None:
        self._spans = spans
        self._pages = pages
        self._device = device
        self._next = 0 if spans else len(pages)
        self._slots = _slots(spans, device)
        self._rotation = _rotations(spans, rotary, device)

    def is_due(self, layer: int) -> bool:
        """See `LayerPlacement.is_due`."""
        return self._next <= min(layer, len(self._pages) - 1)

    def ensure(self, layer: int) -> None:
        """See `LayerPlacement.ensure`."""
        while self.is_due(layer):
            self._place(self._next)
            self._next += 1

    def _place(self, layer: int) -> None:
        parts = [span.chunk.kv[layer, :, span.rows].to(self._device) for span in self._spans]
        keys, values = torch.cat(parts, dim=1)
        self._pages[layer].write(self._slots, rotate_keys(keys, *self._rotation), values)


class StagedPlacement:
    """Places a few layers with one kernel, from the device's memory.

    Where the pages are strided views. Chunks on the host are copied, a few layers ahead, on a stream of its own: two
    buffers take turns, so that the next layers arrive while those of the other buffer are placed and computed. Chunks
    that are on the device already are read where they are.
    """

    def __init__(
        self,
        spans: Sequence[PlacedSpan],
        pages: LayersPages,
        rotary: RotaryTables,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self._pages = pages
        self._rotations = rotary.all
        self._device = device
        self._stream = stream
        self._next = 0
        sizes = group_sizes(len(pages.layer_offsets))
        self._groups = list(pairwise(accumulate(sizes, initial=0)))
        self._staged = [span for span in spans if not span.chunk.kv.is_cuda]
        per_chunk = [span.chunk.kv[0].numel() * max(sizes) for span in self._staged]
        self._offsets = list(accumulate(per_chunk, initial=0))
        self._buffers = torch.empty(2, self._offsets[-1], dtype=pages.keys.dtype, device=device)
        # A blend that fails lets go of them while copies may still be under way.
        self._buffers.record_stream(stream)
        self._arrived = [torch.cuda.Event(), torch.cuda.Event()]
        # The buffers may be memory that earlier work on the main stream still reads.
        stream.wait_stream(torch.cuda.current_stream(device))
        for group in (0, 1):
            self._copy(group)
        self._rows = self._lay_out(spans)

    def is_due(self, layer: int) -> bool:
        """See `LayerPlacement.is_due`."""
        return self._next < len(self._groups) and self._groups[self._next][0] <= layer

    def ensure(self, layer: int) -> None:
        """See `LayerPlacement.ensure`."""
        while self.is_due(layer):
            self._place(self._next)
            self._next += 1

    def _place(self, group: int) -> None:
        first, last = self._groups[group]
        if self._staged:
            self._arrived[group % 2].wait()
        place_rows(self._buffers, self._rows, self._pages, self._rotations, group % 2, first, last - first)
        if self._staged:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._copy(group + 2)

    def _copy(self, group: int) -> None:
        """Start copying a group of layers into the buffer whose turn it is."""
        if group >= len(self._groups) or not self._staged:
            return
        first, last = self._groups[group]
        with torch.cuda.stream(self._stream):
            for span, start in zip(self._staged, self._offsets, strict=False):
                kv = span.chunk.kv[first:last]
                self._buffers[group % 2, start : start + kv.numel()].view(kv.shape).copy_(kv, non_blocking=True)
            self._arrived[group % 2].record(self._stream)

    def _lay_out(self, spans: Sequence[PlacedSpan]) -> StoredRows:
        """One table on the host, one copy to the device."""
        starts = iter(self._offsets)
        base, size = self._buffers.data_ptr(), self._buffers.element_size()
        table = np.empty((8, sum(span.length for span in spans)), dtype=np.int64)
        filled = 0
        for span in spans:
            kv = span.chunk.kv
            row, layer = kv[0, 0, 0].numel(), kv[0].numel()
            if kv.is_cuda:
                first, turn, model = (kv.data_ptr() - base) // size, 0, layer
            else:
                first, turn, model = next(starts), self._offsets[-1], 0
            part = table[:, filled : filled + span.length]
            within = np.arange(span.rows.start, span.rows.stop)
            part[0] = first + within * row
            part[1:5] = [[turn], [model], [layer], [layer // 2]]
            part[5] = within + span.chunk.identity.base_position
            part[6] = within + span.span.start
            part[7] = span.prompt.slots(torch.from_numpy(part[6])).numpy()
            filled += span.length
        return StoredRows(*torch.from_numpy(table).pin_memory().to(self._device, non_blocking=True))


def group_sizes(layers: int) -> list[int]:
    """Layers of each group.

    Small ones come first, so that the first layer is soon there, and last, so that little is left to compute when the
    last bytes have come.
    """
    if layers <= 8:
        return [1] * layers
    middle = layers - 8
    rest = [middle % LAYERS_TOGETHER] if middle % LAYERS_TOGETHER else []
    return [1, 1, 2, *[LAYERS_TOGETHER] * (middle // LAYERS_TOGETHER), *rest, 2, 1, 1]


def staging_bytes(rows: int, forward: LayersForward) -> int:
    """Bytes of the two buffers through which `rows` rows of chunks on the host come to a GPU."""
    row = 2 * forward.kv_heads * forward.head_dim * forward.dtype.itemsize
    return 2 * min(LAYERS_TOGETHER, forward.num_layers) * rows * row


def _slots(spans: Sequence[PlacedSpan], device: torch.device) -> torch.Tensor:
    slots = [torch.empty(0, dtype=torch.int64), *(s.prompt.slots(torch.arange(s.start, s.span.end)) for s in spans)]
    return torch.cat(slots).to(device, non_blocking=True)


def _rotations(
    spans: Sequence[PlacedSpan], rotary: RotaryTables, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) over all rows, each [rows, head_dim] float32."""
    old = [torch.empty(0, dtype=torch.int64)]
    new = [torch.empty(0, dtype=torch.int64)]
    for span in spans:
        new.append(torch.arange(span.start, span.span.end))
        old.append(new[-1] - span.span.start + span.chunk.identity.base_position)
    return rotary.between(torch.cat(old).to(device), torch.cat(new).to(device))
