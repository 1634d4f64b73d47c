"""Stored chunk KV, moved to where a prompt uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cacheblend.plan import Span
from cacheblend.reference.forward import RowsForward
from cacheblend.reference.sequence import RunningSequence
from cacheblend.relocation import rotate_keys, rotation_between
from kvstore.chunk import ChunkKV
from kvstore.key import ChunkKey


@dataclass(frozen=True)
class _Placed:
    span: Span
    chunk: ChunkKV
    rotation: tuple[torch.Tensor, torch.Tensor] | None


class Placement:
    """Writes a sequence's reused chunks into its own KV, layer by layer.

    Args:
        forward: whose rotary tables the keys were made with.
        sequence: with KV allocated.
        chunks: those that its plan reads, by key.
    """

    def __init__(self, forward: RowsForward, sequence: RunningSequence, chunks: Mapping[ChunkKey, ChunkKV]) -> None:
        self._sequence = sequence
        self._device = forward.device
        self._placed = [
            _Placed(span, chunks[key], self._rotation(forward, span, chunks[key]))
            for span, key in zip(sequence.plan.reused, sequence.plan.keys, strict=True)
            if key in chunks
        ]

    @staticmethod
    def _rotation(forward: RowsForward, span: Span, chunk: ChunkKV) -> tuple[torch.Tensor, torch.Tensor] | None:
        base = chunk.identity.base_position
        if base == span.start:
            return None
        old = torch.arange(base, base + span.length, device=forward.device)
        return rotation_between(forward.rotary_tables, old, old + (span.start - base), forward.rope_scaling)

    def place(self, layer: int) -> None:
        """Write all chunks' KV of `layer`, keys relocated."""
        keys, values = self._sequence.keys(layer), self._sequence.values(layer)
        for placed in self._placed:
            k = placed.chunk.k(layer).to(self._device)
            if placed.rotation is not None:
                k = rotate_keys(k, *placed.rotation)
            where = slice(placed.span.start, placed.span.end)
            keys[:, where] = k.transpose(0, 1)
            values[:, where] = placed.chunk.v(layer).to(self._device).transpose(0, 1)
