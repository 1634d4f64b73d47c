"""Some layers of several chunks copied from page-locked memory to a GPU, with as little asking as can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.copy_turns import CopyTurns
from kvstore.cuda_runtime import copies_to_device


class LayerCopies:
    """Copies of the same layers of all chunks.

    Asked of CUDA itself where that can be, all of a turn at once: torch, which is asked for the slices first, takes
    three times as long.

    Args:
        destinations: [layers, ..] each, contiguous, on the current device.
        sources: [layers, ..] each, contiguous; a layer has the shape and dtype of its destination's. All must live
            until `stream` has done what is asked for. One that is not page-locked is waited for.
        stream: of that device.
    """

    def __init__(
        self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> None:
        self._pairs = list(zip(destinations, sources, strict=True))
        self._stream = stream
        self._turns = CopyTurns(stream)
        # It keeps the interpreter's lock, and a copy that is waited for would keep it as long.
        self._ask = copies_to_device() if all(source.is_pinned() for source in sources) else None
        self._addresses = [
            (to.data_ptr(), source.data_ptr(), source.nbytes // len(source)) for to, source in self._pairs
        ]

    def start(self, to: int, first: int, layers: int) -> None:
        """Ask for the copies of `layers` layers from the `first` of each source to place `to` of its destination.

        Raises:
            RuntimeError: CUDA refuses.
        """
        if self._ask is None:
            with torch.cuda.stream(self._stream):
                for destination, source in self._pairs:
                    destination[to : to + layers].copy_(source[first : first + layers], non_blocking=True)
            return
        for turn in self._turns.of([layers * layer for _, _, layer in self._addresses]):
            destinations, sources, sizes = [], [], []
            for index, done, nbytes in turn:
                address, origin, layer = self._addresses[index]
                destinations.append(address + to * layer + done)
                sources.append(origin + first * layer + done)
                sizes.append(nbytes)
            self._ask(destinations, sources, sizes, self._stream.cuda_stream)
