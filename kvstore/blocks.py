"""Tensors out of few large buffers, each with a storage of its own whose end gives its block back.

A tensor that merely looks into a buffer would keep the whole buffer alive and say nothing of its own end. So each
block is handed to torch as foreign memory: torch keeps the object that owns it for as long as any tensor looks
into the block, and when that object goes, the block is free.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from kvstore.arena import Arena
from kvstore.pins import Event


class Buffer(Protocol):
    """One piece of memory, alive for as long as this object is."""

    def block(self, offset: int, nbytes: int) -> tuple[object, torch.Tensor]:
        """Part of the memory as uint8, [nbytes], and the object that the tensor's storage keeps alive."""
        ...


@dataclass(frozen=True, slots=True)
class _Slab:
    arena: Arena
    buffer: Buffer


class ArenaMemory:
    """Tensors out of a buffer of fixed size, and out of one more each time it grows; see `TensorMemory`.

    A tensor lies within one buffer. Buffers are kept until the memory and the last tensor are gone. Thread-safe.

    Args:
        make_buffer: makes a buffer of so many bytes; StoreError if there is no such memory.
        fence: see `kvstore.tensor_memory.TensorMemory.fence`.
    """

    def __init__(self, make_buffer: Callable[[int], Buffer], fence: Callable[[], Event | None] = lambda: None):
        self.fence = fence
        self._make_buffer = make_buffer
        self._slabs: list[_Slab] = []
        # Blocks end wherever the last reference to a tensor goes, also inside this class: no lock is taken there.
        self._returned: deque[tuple[_Slab, int]] = deque()
        self._lock = threading.Lock()
        # Making a buffer takes its time, in which others take and give blocks; held before the other lock.
        self._growing = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        with self._lock:
            return sum(slab.arena.nbytes for slab in self._slabs)

    @property
    def bytes_used(self) -> int:
        """Bytes of all blocks that a tensor looks into, each rounded up to the arena's alignment."""
        with self._lock:
            self._take_back()
            return sum(slab.arena.bytes_used for slab in self._slabs)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest tensor that there is room for."""
        with self._lock:
            self._take_back()
            return max((slab.arena.largest_free for slab in self._slabs), default=0)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """See `TensorMemory.allocate`."""
        with self._lock:
            self._take_back()
            for slab in sorted(self._slabs, key=_largest_free) if len(self._slabs) > 1 else self._slabs:
                offset = slab.arena.allocate(nbytes)
                if offset is not None:
                    with no_inference_mode():
                        owner, block = slab.buffer.block(offset, nbytes)
                    weakref.finalize(owner, self._returned.append, (slab, offset)).atexit = False
                    return block
        return None

    def adopt(self, kv: torch.Tensor) -> None:
        """A tensor from elsewhere is always copied here."""

    def grow(self, nbytes: int) -> None:
        """See `TensorMemory.grow`."""
        with self._growing:
            missing = nbytes - self.nbytes
            if missing > 0:
                arena = Arena(missing)
                slab = _Slab(arena, self._make_buffer(arena.nbytes))
                with self._lock:
                    self._slabs.append(slab)

    def _take_back(self) -> None:
        while self._returned:
            slab, offset = self._returned.popleft()
            slab.arena.free(offset)


def no_inference_mode() -> AbstractContextManager[object]:
    """Tensors made in this block are ordinary ones; switching the mode off where it is off would cost microseconds."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _largest_free(slab: _Slab) -> int:
    return slab.arena.largest_free
