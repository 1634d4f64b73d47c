"""The GPU pool: chunks in a buffer on the device, beside the pages of the engine."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvstore.blocks import ArenaMemory, Buffer
from kvstore.errors import StoreError
from kvstore.memory import MemoryTier
from kvstore.pinned import HostBuffer
from kvstore.pins import Event, PinCounts
from kvstore.tiers import Tier


class GpuPool(MemoryTier):
    """Chunks on one device, in a buffer that is taken as a whole at once; see `MemoryTier`.

    A chunk that left may still be read by kernels that are queued. So its memory is given to nobody else before
    an event is over: the one given to `evict` or to the release of the last pin, else one recorded then on the
    calling thread's current stream. Whoever queues kernels later, or on another stream, must hold a pin and
    give it back `after` them. A copy into reserved room is the caller's to wait for before it commits.

    Args:
        nbytes: KV bytes the pool may hold; 0 holds nothing.
        device: a CUDA device, or the CPU for tests.
        pins: shared with other tiers; None for pins of its own.

    Raises:
        StoreError: a negative size, or the device has not so much free memory: the sentence names the
            `gpu_memory_utilization` that would fit.
    """

    def __init__(self, nbytes: int, device: torch.device | str, pins: PinCounts | None = None):
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        memory = ArenaMemory(self._make_buffer, self._record) if on_gpu else ArenaMemory(HostBuffer)
        super().__init__(nbytes, memory, Tier.GPU, pins)

    def _make_buffer(self, nbytes: int) -> Buffer:
        free, total = torch.cuda.mem_get_info(self.device)
        require_free(nbytes, free, total, torch.cuda.memory_reserved(self.device))
        return _DeviceBuffer(nbytes, self.device)

    def _record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def require_free(asked: int, free: int, total: int, ours: int) -> None:
    """Refuse a pool that the device has no room for.

    Args:
        asked: bytes of the pool.
        free: bytes free on the device.
        total: bytes of the device.
        ours: bytes that this process's tensors have taken, the engine's pages among them.

    Raises:
        StoreError: it does not fit; the sentence names the bytes and the `gpu_memory_utilization` that would fit.
    """
    if asked <= free:
        return
    used_by_others = total - free - ours
    fits = math.floor(100 * (total - asked - used_by_others) / total) / 100
    remedy = f"set gpu_memory_utilization to {fits:.2f} or less, or ask for less" if fits > 0 else "ask for less"
    raise StoreError(f"A GPU pool of {asked} bytes does not fit: {free} of {total} bytes are free; {remedy}.")


class _DeviceBuffer:
    def __init__(self, nbytes: int, device: torch.device):
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def block(self, offset: int, nbytes: int) -> tuple[object, torch.Tensor]:
        owner = _DeviceBlock(self._bytes.data_ptr() + offset, nbytes)
        return owner, torch.as_tensor(owner, device=self._bytes.device)


class _DeviceBlock:
    """Part of a buffer as foreign memory; torch keeps this object for as long as a tensor looks into it."""

    def __init__(self, start: int, nbytes: int):
        self._start = start
        self._nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._nbytes,), "data": (self._start, False)}
