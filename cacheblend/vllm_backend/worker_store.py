"""What a worker keeps chunks in, and what moves them: opened once the model's pages are known."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from cacheblend.errors import BlendError
from cacheblend.vllm_backend.forward import LayersForward
from cacheblend.vllm_backend.placement import staging_bytes
from cacheblend.vllm_backend.settings import ConnectorSettings
from kvstore.cuda_transfer import CudaPrefetcher
from kvstore.errors import StoreError
from kvstore.gpu import GpuPool, require_free
from kvstore.key import ShardLayout
from kvstore.remote import RemoteTier
from kvstore.store import ChunkStore
from kvstore.tiers import Tier
from kvstore.transfer import AsyncPrefetcher, ThreadPrefetcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerStore:
    """The chunks of one worker.

    Attributes:
        store: where they are.
        prefetcher: moves them.
    """

    store: ChunkStore
    prefetcher: AsyncPrefetcher

    def set_budget(self, tier: Tier, nbytes: int) -> int:
        """Change a memory tier's budget.

        Returns:
            What it may hold now: as before where there is not so much memory.
        """
        try:
            self.store.set_budget(tier, nbytes)
        except StoreError as error:
            logger.warning("the budget of tier %s stays: %s", tier.value, error)
        return self.store.budget_bytes(tier)

    def close(self) -> None:
        """Stop the transfers, then give the memory back."""
        self.prefetcher.close()
        self.store.close()


def open_store(
    settings: ConnectorSettings, root: Path | None, shard: ShardLayout, forward: LayersForward, placed_rows: int
) -> WorkerStore:
    """Open a worker's store.

    Args:
        settings: of the connector.
        root: folder of the disk tier; None without one.
        shard: the worker's part of every chunk.
        forward: knows the device and the shapes.
        placed_rows: rows of stored KV that one blend moves.

    Raises:
        BlendError: the device or the host has not so much memory; the sentence names the remedy.
    """
    on_gpu = forward.device.type == "cuda"
    try:
        if on_gpu:
            _require_room(settings.gpu_pool_bytes + staging_bytes(placed_rows, forward), forward.device)
        pool = GpuPool(settings.gpu_pool_bytes, forward.device) if on_gpu and settings.gpu_pool_bytes else None
        store = ChunkStore(
            root,
            settings.host_budget_bytes,
            shard=shard,
            pinned=on_gpu,
            vouches_alone=True,
            gpu=pool,
            remote=None if settings.remote is None else RemoteTier(settings.remote),
        )
    except StoreError as error:
        raise BlendError(str(error)) from error
    return WorkerStore(store, ThreadPrefetcher(store) if pool is None else CudaPrefetcher(store))


def _require_room(nbytes: int, device: torch.device) -> None:
    """Refuse a pool and a workspace that do not fit beside what is on the device."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    require_free(nbytes, free, total, torch.cuda.memory_reserved(device))
