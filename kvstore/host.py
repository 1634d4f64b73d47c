"""The host tier: chunks in this process's memory."""

from __future__ import annotations

import torch

from kvstore.blocks import ArenaMemory
from kvstore.memory import MemoryTier
from kvstore.pinned import HostBuffer
from kvstore.pins import PinCounts
from kvstore.tiers import Tier


class PlainMemory:
    """Ordinary torch tensors, limited by the tier's budget alone; see `kvstore.tensor_memory.TensorMemory`."""

    largest_free = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `TensorMemory.allocate`; there is always room."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def adopt(self, kv: torch.Tensor) -> torch.Tensor | None:
        """The tensor, if it is on the host in a storage of its own: a view would keep its whole base alive."""
        return kv if kv.device.type == "cpu" and kv.untyped_storage().nbytes() == kv.nbytes else None

    def grow(self, nbytes: int) -> None:
        """Nothing to do: tensors are allocated one by one."""

    def fence(self) -> None:
        """Nothing is ever queued on the host."""


class HostTier(MemoryTier):
    """Chunks on the host; see `MemoryTier`.

    Args:
        budget_bytes: KV bytes this tier may hold; 0 holds nothing.
        pinned: keep chunks in page-locked memory, which a GPU copies from at full speed and without waiting.
            All of the budget is taken and locked at once, and stays so when the budget is lowered. Without CUDA
            there is nothing to lock for, and chunks are ordinary tensors.
        pins: shared with other tiers; None for pins of its own.

    Raises:
        StoreError: a negative budget, or memory that cannot be had or locked.
    """

    def __init__(self, budget_bytes: int, pinned: bool = False, pins: PinCounts | None = None):
        lock = pinned and torch.cuda.is_available()
        memory = ArenaMemory(lambda nbytes: HostBuffer(nbytes, pinned=True)) if lock else PlainMemory()
        super().__init__(budget_bytes, memory, Tier.HOST, pins)
