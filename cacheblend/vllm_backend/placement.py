"""Stored chunk KV, moved to where prompts use it and written into their pages, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cacheblend.kernels.place_rows import StagedRows, place_rows
from cacheblend.plan import Span
from cacheblend.relocation import rotate_keys
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rotary import RotaryTables
from cacheblend.vllm_backend.rows import PromptPages
from kvstore.chunk import ChunkKV

LAYERS_TOGETHER = 4
"""Layers that are copied to the GPU with one call a chunk."""


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

    def ensure(self, layer: int) -> None:
        """Write every layer up to `layer` that is not written yet."""
        ...


def place_layers(
    spans: Sequence[PlacedSpan], pages: Sequence[LayerPages], rotary: RotaryTables, device: torch.device
) -> LayerPlacement:
    """How `spans` get into the pages of each layer.

    Args:
        spans: what to write; none empty.
        pages: of each layer.
        rotary: of the model.
        device: of the model.
    """
    on_gpu = device.type == "cuda" and pages[0].views is not None
    return (
        StagedPlacement(spans, pages, rotary, device)
        if spans and on_gpu
        else PlainPlacement(spans, pages, rotary, device)
    )


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

    def ensure(self, layer: int) -> None:
        """See `LayerPlacement.ensure`."""
        while self._next <= layer and self._next < len(self._pages):
            self._place(self._next)
            self._next += 1

    def _place(self, layer: int) -> None:
        parts = [span.chunk.kv[layer, :, span.rows] for span in self._spans]
        keys, values = torch.cat(parts, dim=1).to(self._device)
        self._pages[layer].write(self._slots, rotate_keys(keys, *self._rotation), values)


class StagedPlacement:
    """Copies a few layers of all chunks ahead, on a stream of its own, and has one kernel a layer place them.

    Where the pages are a strided view: the kernel writes through it. Two buffers take turns, so that the copies of the
    next layers run while the layers of the other buffer are placed and computed.
    """

    def __init__(
        self, spans: Sequence[PlacedSpan], pages: Sequence[LayerPages], rotary: RotaryTables, device: torch.device
    ) -> None:
        self._spans = spans
        self._views = [page.views for page in pages]
        self._device = device
        self._next = 0
        kv = spans[0].chunk.kv
        row = kv.shape[3] * kv.shape[4]
        sizes = [2 * span.span.length * row for span in spans]
        self._offsets = [sum(sizes[:index]) * LAYERS_TOGETHER for index in range(len(sizes) + 1)]
        self._staged = self._lay_out(row, rotary)
        self._stream = torch.cuda.Stream(device)
        self._buffers = torch.empty(2, self._offsets[-1], dtype=kv.dtype, device=device)
        self._arrived = [torch.cuda.Event(), torch.cuda.Event()]
        # The buffers may be memory that earlier work on the main stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        for first in (0, LAYERS_TOGETHER):
            self._copy(first)

    def ensure(self, layer: int) -> None:
        """See `LayerPlacement.ensure`."""
        while self._next <= layer and self._next < len(self._views):
            self._place(self._next)
            self._next += 1

    def _place(self, layer: int) -> None:
        turn, within = divmod(layer, LAYERS_TOGETHER)
        if within == 0:
            self._arrived[turn % 2].wait()
        views = self._views[layer]
        assert views is not None
        place_rows(self._buffers[turn % 2], within, self._staged, *views)
        if within == LAYERS_TOGETHER - 1:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._copy(layer + 1 + LAYERS_TOGETHER)

    def _copy(self, first: int) -> None:
        """Start copying the layers from `first` on into the buffer whose turn it is."""
        last = min(first + LAYERS_TOGETHER, len(self._views))
        if first >= last:
            return
        turn = first // LAYERS_TOGETHER % 2
        with torch.cuda.stream(self._stream):
            for span, start in zip(self._spans, self._offsets, strict=False):
                kv = span.chunk.kv[first:last]
                self._buffers[turn, start : start + kv.numel()].view(kv.shape).copy_(kv, non_blocking=True)
            self._arrived[turn].record(self._stream)

    def _lay_out(self, row: int, rotary: RotaryTables) -> StagedRows:
        first, steps = [], []
        for span, start in zip(self._spans, self._offsets, strict=False):
            first.append(start + torch.arange(span.rows.start, span.rows.stop) * row)
            steps.append(torch.full((span.length,), span.span.length * row))
        kind_step = torch.cat(steps).to(self._device, non_blocking=True)
        cos, sin = _rotations(self._spans, rotary, self._device)
        return StagedRows(
            torch.cat(first).to(self._device, non_blocking=True),
            2 * kind_step,
            kind_step,
            cos.contiguous(),
            sin.contiguous(),
            _slots(self._spans, self._device),
        )


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
