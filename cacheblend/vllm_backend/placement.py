"""Stored chunk KV, moved to where prompts use it and written into their pages, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend.plan import Span
from cacheblend.relocation import rotate_keys
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rotary import RotaryTables
from cacheblend.vllm_backend.rows import PromptPages
from kvstore.chunk import ChunkKV

LAYERS_AHEAD = 3
"""Layers whose KV is on its way to the GPU while one is written."""


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


class LayerPlacement:
    """Writes each layer's chunk KV into the pages when a pass first comes to that layer.

    On a GPU the copies of the next layers run on a stream of their own meanwhile, through a ring of staging buffers.

    Args:
        spans: what to write; none empty.
        pages: of each layer.
        rotary: of the model.
        device: of the model.
    """

    def __init__(
        self, spans: Sequence[PlacedSpan], pages: Sequence[LayerPages], rotary: RotaryTables, device: torch.device
    ) -> None:
        self._spans = spans
        self._pages = pages
        self._next = 0
        self._staging: _Staging | None = None
        if not spans:
            self._next = len(pages)
            return
        slots = [s.prompt.slots(torch.arange(s.start, s.span.end)) for s in spans]
        self._slots = torch.cat(slots).to(device, non_blocking=True)
        self._rotation = _join_rotations(spans, rotary, device)
        if device.type == "cuda":
            self._staging = _Staging(spans, len(pages), device)

    def ensure(self, layer: int) -> None:
        """Write every layer up to `layer` that is not written yet."""
        while self._next <= layer and self._next < len(self._pages):
            self._place(self._next)
            self._next += 1

    def _place(self, layer: int) -> None:
        keys, values = self._stored(layer) if self._staging is None else self._staging.take(layer)
        if self._rotation is not None:
            keys = rotate_keys(keys, *self._rotation)
        self._pages[layer].write(self._slots, keys, values)
        if self._staging is not None:
            self._staging.give_back(layer)

    def _stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [span.chunk.kv[layer, :, span.rows] for span in self._spans]
        keys, values = torch.cat(parts, dim=1)
        return keys, values


class _Staging:
    """Copies of a layer's chunk KV on the GPU, made ahead on a stream of their own."""

    def __init__(self, spans: Sequence[PlacedSpan], layers: int, device: torch.device) -> None:
        self._spans = spans
        self._layers = layers
        self._stream = torch.cuda.Stream(device)
        kv = spans[0].chunk.kv
        rows = sum(span.length for span in spans)
        shape = (min(LAYERS_AHEAD, layers), 2, rows, *kv.shape[3:])
        self._buffers = torch.empty(shape, dtype=kv.dtype, device=device)
        self._copied = [torch.cuda.Event() for _ in range(shape[0])]
        # The buffers may be memory that earlier work on the main stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        for layer in range(shape[0]):
            self._copy(layer)

    def take(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of a layer, each [rows, kv_heads, head_dim], once they have arrived."""
        self._copied[layer % len(self._copied)].wait()
        buffer = self._buffers[layer % len(self._buffers)]
        return buffer[0], buffer[1]

    def give_back(self, layer: int) -> None:
        """The layer is written: its buffer takes the next one that has none."""
        following = layer + len(self._buffers)
        if following < self._layers:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._copy(following)

    def _copy(self, layer: int) -> None:
        buffer = self._buffers[layer % len(self._buffers)]
        with torch.cuda.stream(self._stream):
            first = 0
            for span in self._spans:
                last = first + span.length
                for kind in (0, 1):
                    buffer[kind, first:last].copy_(span.chunk.kv[layer, kind, span.rows], non_blocking=True)
                first = last
            self._copied[layer % len(self._copied)].record(self._stream)


def _join_rotations(
    spans: Sequence[PlacedSpan], rotary: RotaryTables, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(cos, sin) over all rows, each [rows, head_dim] float32; None if nothing moves."""
    turns = []
    for span in spans:
        base = span.chunk.identity.base_position + span.rows.start
        turns.append(rotary.between(base, span.start, span.length))
    known = next((turn for turn in turns if turn is not None), None)
    if known is None:
        return None
    still = (torch.ones(1, known[0].shape[1], device=device), torch.zeros(1, known[0].shape[1], device=device))
    cos, sin = [], []
    for span, turn in zip(spans, turns, strict=True):
        c, s = turn if turn is not None else (part.expand(span.length, -1) for part in still)
        cos.append(c)
        sin.append(s)
    return torch.cat(cos), torch.cat(sin)
