"""Stored chunk KV, moved to where prompts use it and written into their pages, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch

from cacheblend.kernels.place_rows import LayersPages, PlacePass
from cacheblend.kernels.stored_rows import StoredSpan, StoredSpans
from cacheblend.plan import Span
from cacheblend.relocation import rotate_keys
from cacheblend.vllm_backend.forward import LayersForward
from cacheblend.vllm_backend.layer_groups import layer_groups, ring_layers
from cacheblend.vllm_backend.pages import LayerPages
from cacheblend.vllm_backend.rotary import RotaryTables
from cacheblend.vllm_backend.rows import PromptPages
from kvstore.chunk import ChunkKV
from kvstore.layer_copies import LayerCopies

COPIED_BEFORE_SPANS = 2
"""Groups whose copies start before the table of spans is made: the link is busy meanwhile."""
STARTED_AHEAD = 4
"""Groups that are started from the one that is wanted on, once the model has something to do."""


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


class PlacementStreams(NamedTuple):
    """Where chunks come into the pages of a GPU, beside what is computed.

    Attributes:
        copying: from the host to a ring of layers.
        placing: from there, or from the GPU pool, into the pages.
    """

    copying: torch.cuda.Stream
    placing: torch.cuda.Stream


@cache
def placement_streams(device: torch.device) -> PlacementStreams:
    """The same for every blend, for PyTorch hands out few."""
    return PlacementStreams(torch.cuda.Stream(device), torch.cuda.Stream(device))


class LayerPlacement(Protocol):
    """Writes each layer's chunk KV into the pages before a pass comes to that layer."""

    def is_due(self, layer: int) -> bool:
        """Whether a layer up to `layer` is not written yet."""
        ...

    def ensure(self, layer: int) -> None:
        """Have every layer up to `layer` written for what is queued on the current stream afterwards."""
        ...

    def start_all(self) -> None:
        """Start all that is left, for the host has time."""
        ...

    def end(self) -> None:
        """Have the current stream wait for all that was started: the pages may be somebody else's afterwards."""
        ...


def place_layers(spans: Sequence[PlacedSpan], forward: LayersForward) -> LayerPlacement:
    """How `spans` get into the pages of each layer.

    Args:
        spans: what to write; none empty.
        forward: knows the pages, the model's rotations and the device.
    """
    if not spans or forward.device.type != "cuda" or forward.pages[0].views is None:
        return PlainPlacement(spans, forward.pages, forward.rotary, forward.device)
    given = (spans, forward.layers_pages, forward.rotary, forward.device)
    return PoolPlacement(*given) if all(span.chunk.kv.is_cuda for span in spans) else StagedPlacement(*given)


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

    def start_all(self) -> None:
        """See `LayerPlacement.start_all`: nothing here happens beside what is computed."""

    def end(self) -> None:
        """See `LayerPlacement.end`."""

    def _place(self, layer: int) -> None:
        parts = [span.chunk.kv[layer, :, span.rows].to(self._device) for span in self._spans]
        keys, values = torch.cat(parts, dim=1)
        self._pages[layer].write(self._slots, rotate_keys(keys, *self._rotation), values)


class PoolPlacement:
    """Places chunks that are all on the device with one kernel, at once: while the host prepares what is computed.

    Where the pages are strided views.
    """

    def __init__(
        self, spans: Sequence[PlacedSpan], pages: LayersPages, rotary: RotaryTables, device: torch.device
    ) -> None:
        self._placing = placing = placement_streams(device).placing
        # The pages are free when earlier work on them is done.
        placing.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(placing):
            places = PlacePass(pages.keys, stored_spans(spans, (), pages.keys), pages, rotary.all)
            places.place(0, 0, len(pages.layer_offsets))
        self._is_waited_for = False

    def is_due(self, layer: int) -> bool:
        """See `LayerPlacement.is_due`."""
        return not self._is_waited_for

    def ensure(self, layer: int) -> None:
        """See `LayerPlacement.ensure`."""
        if not self._is_waited_for:
            self.end()
            self._is_waited_for = True

    def start_all(self) -> None:
        """See `LayerPlacement.start_all`: all is started."""

    def end(self) -> None:
        """See `LayerPlacement.end`."""
        torch.cuda.current_stream(self._placing.device).wait_stream(self._placing)


class StagedPlacement:
    """Places a few layers with one kernel, from the device's memory, on a stream beside the one that computes.

    Where the pages are strided views. Chunks on the host are copied on another stream into a ring of layers, and leave
    it as soon as they are placed, however far the computation is. One chunk at least is on the host; those that are on
    the device already are read where they are.
    """

    def __init__(
        self,
        spans: Sequence[PlacedSpan],
        pages: LayersPages,
        rotary: RotaryTables,
        device: torch.device,
    ) -> None:
        self._streams = streams = placement_streams(device)
        layers = len(pages.layer_offsets)
        staged = [span.chunk.kv for span in spans if not span.chunk.kv.is_cuda]
        self._groups = layer_groups(layers)
        self._next = self._started = self._copied = 0
        room = ring_layers(layers)
        sizes = [room * (kv.numel() // layers) for kv in staged]
        offsets = list(accumulate(sizes, initial=0))
        # Room in the ring is free when earlier blends are placed.
        streams.copying.wait_stream(streams.placing)
        with torch.cuda.stream(streams.placing):
            self._buffer = torch.empty(offsets[-1], dtype=pages.keys.dtype, device=device)
        # A blend that fails lets go of it while copies may still be under way.
        self._buffer.record_stream(streams.copying)
        parts = self._buffer.split(sizes)
        rings = [part.view(room, *kv.shape[1:]) for part, kv in zip(parts, staged, strict=False)]
        self._copies = LayerCopies(rings, staged, streams.copying)
        self._arrived = [torch.cuda.Event() for _ in self._groups]
        self._placed = [torch.cuda.Event() for _ in self._groups]
        self._copy_until(COPIED_BEFORE_SPANS)
        # Pages are free only when earlier work on them is done.
        streams.placing.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(streams.placing):
            self._pass = PlacePass(self._buffer, stored_spans(spans, offsets, self._buffer), pages, rotary.all)
        self._copy_until(next((i for i, group in enumerate(self._groups) if group.after >= 0), len(self._groups)))

    def is_due(self, layer: int) -> bool:
        """See `LayerPlacement.is_due`."""
        return self._next < len(self._groups) and self._groups[self._next].first <= layer

    def ensure(self, layer: int) -> None:
        """See `LayerPlacement.ensure`."""
        while self.is_due(layer):
            # The first group alone: the model waits for it, and for this thread.
            self._start_until(self._next + (STARTED_AHEAD if self._next else 1))
            self._placed[self._next].wait()
            self._next += 1

    def start_all(self) -> None:
        """See `LayerPlacement.start_all`."""
        self._start_until(len(self._groups))

    def end(self) -> None:
        """See `LayerPlacement.end`."""
        torch.cuda.current_stream(self._buffer.device).wait_stream(self._streams.placing)

    def _start_until(self, end: int) -> None:
        """Start the groups before `end`."""
        while self._started < min(end, len(self._groups)):
            self._copy_until(self._started + 1)
            with torch.cuda.stream(self._streams.placing):
                self._place(self._started)
            self._started += 1

    def _place(self, index: int) -> None:
        group = self._groups[index]
        self._arrived[index].wait()
        self._pass.place(group.turn, group.first, group.layers)
        self._placed[index].record()

    def _copy_until(self, end: int) -> None:
        """Start copying the groups before `end`."""
        while self._copied < min(end, len(self._groups)):
            self._copy(self._copied)
            self._copied += 1

    def _copy(self, index: int) -> None:
        """Start copying a group of layers, as soon as it has room."""
        group = self._groups[index]
        if group.after >= 0:
            self._streams.copying.wait_event(self._placed[group.after])
        self._copies.start(group.turn, group.first, group.layers)
        self._arrived[index].record(self._streams.copying)


def stored_spans(spans: Sequence[PlacedSpan], offsets: Sequence[int], buffer: torch.Tensor) -> StoredSpans:
    """Where the rows of `spans` lie and go, on the device.

    Args:
        spans: what is written.
        offsets: elements from the start of `buffer` to the ring of each chunk on the host, in order.
        buffer: of the rings, on the device; any tensor of the chunks' dtype there if no chunk is on the host.
    """
    starts = iter(offsets)
    prompts = list({id(span.prompt): span.prompt for span in spans}.values())
    blocks = dict(zip(map(id, prompts), accumulate((len(p.block_ids) for p in prompts), initial=0), strict=False))
    lines = [_of_span(span, starts, buffer, blocks[id(span.prompt)]) for span in spans]
    return StoredSpans.on(buffer.device, lines, np.concatenate([prompt.block_ids.numpy() for prompt in prompts]))


def _of_span(span: PlacedSpan, starts: Iterator[int], buffer: torch.Tensor, blocks: int) -> StoredSpan:
    kv = span.chunk.kv
    _, _, tokens, heads, head_dim = kv.shape
    row = heads * head_dim
    layer = 2 * tokens * row
    if kv.is_cuda:
        first, turn, model = (kv.data_ptr() - buffer.data_ptr()) // buffer.element_size(), 0, layer
    else:
        first, turn, model = next(starts), layer, 0
    skipped = span.rows.start
    old = skipped + span.chunk.identity.base_position
    return StoredSpan(
        first=first + skipped * row,
        turn_step=turn,
        model_step=model,
        layer_step=layer,
        kind_step=layer // 2,
        row_step=row,
        old=old,
        new=span.start,
        rows=span.length,
        blocks=blocks,
    )


def staging_bytes(rows: int, forward: LayersForward) -> int:
    """Bytes of the ring through which `rows` rows of chunks on the host come to a GPU."""
    row = 2 * forward.kv_heads * forward.head_dim * forward.dtype.itemsize
    return ring_layers(forward.num_layers) * rows * row


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
