"""What a worker keeps chunks in, and what moves them: opened once the model's pages are known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from cacheblend.errors import BlendError
from cacheblend.vllm_backend.forward import LayersForward
from cacheblend.vllm_backend.settings import ConnectorSettings
from kvstore.chunk import ChunkKV
from kvstore.cuda_transfer import CudaPrefetcher
from kvstore.errors import StoreError
from kvstore.gpu import GpuPool, require_free
from kvstore.key import ChunkIdentity, ShardLayout
from kvstore.remote import RemoteTier
from kvstore.store import ChunkStore
from kvstore.tiers import PutReport, Tier
from kvstore.transfer import AsyncPrefetcher, ThreadPrefetcher, TransferOrder, TransferResult

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerStore:
    """The chunks of one worker.

    Attributes:
        store: where they are.
        prefetcher: moves them.
        background: does what takes its time, one thing after another: talks to the remote server, takes memory.
        has_remote: whether there is one.
        changed_budgets: tiers whose budget was to be changed.
        promotions: copies to the GPU that were ordered and have not begun.
    """

    store: ChunkStore
    prefetcher: AsyncPrefetcher
    background: ThreadPoolExecutor
    has_remote: bool
    changed_budgets: SimpleQueue[Tier] = field(default_factory=SimpleQueue)
    promotions: list[TransferOrder] = field(default_factory=list)

    def put(self, chunk: ChunkKV) -> PutReport:
        """Keep a chunk; a remote server gets it in the background.

        Raises:
            StoreError: the store is closed.
        """
        report = self.store.put(chunk, remote=False)
        if self.has_remote:
            self.background.submit(_logged, self.store.put_on_remote, chunk)
        return report

    def look_remote(self, identities: Sequence[ChunkIdentity]) -> None:
        """Ask the remote server for these chunks in the background; those it has are published."""
        if identities and self.has_remote:
            self.background.submit(_logged, self.store.look_remote, identities)

    def begin(self, orders: Sequence[TransferOrder]) -> None:
        """Begin to load what shall come to the host; copies to the GPU begin with the next `take_results`."""
        loads = [order for order in orders if order.target is Tier.HOST]
        if loads:
            self.prefetcher.start(loads)
        self.promotions.extend(order for order in orders if order.target is not Tier.HOST)

    def take_results(self) -> list[TransferResult]:
        """Begin the copies to the GPU that wait for it; the transfers that have ended since the last call."""
        if self.promotions:
            self.prefetcher.start(self.promotions)
            self.promotions.clear()
        return self.prefetcher.poll()

    def set_budget(self, tier: Tier, nbytes: int) -> None:
        """Change a memory tier's budget; `take_budgets` tells what came of it.

        A larger one takes and locks memory, tenths of a second a GiB, so that is done in the background.
        """
        if nbytes <= self.store.budget_bytes(tier):
            self._change_budget(tier, nbytes)
        else:
            self.background.submit(self._change_budget, tier, nbytes)

    def take_budgets(self) -> dict[Tier, int]:
        """Budgets that were to be changed since the last call, as they are now."""
        changed = {self.changed_budgets.get_nowait() for _ in range(self.changed_budgets.qsize())}
        return {tier: self.store.budget_bytes(tier) for tier in changed}

    def _change_budget(self, tier: Tier, nbytes: int) -> None:
        try:
            self.store.set_budget(tier, nbytes)
        except StoreError as error:
            logger.warning("the budget of tier %s stays: %s", tier.value, error)
        self.changed_budgets.put(tier)

    def close(self) -> None:
        """Stop the transfers, then give the memory back."""
        self.background.shutdown(wait=True, cancel_futures=True)
        self.prefetcher.close()
        self.store.close()


def open_store(
    settings: ConnectorSettings, root: Path | None, shard: ShardLayout, forward: LayersForward, workspace_bytes: int
) -> WorkerStore:
    """Open a worker's store.

    Args:
        settings: of the connector.
        root: folder of the disk tier; None without one.
        shard: the worker's part of every chunk.
        forward: knows the device.
        workspace_bytes: of the device's memory that blends take while they run.

    Raises:
        BlendError: the device or the host has not so much memory; the sentence names the remedy.
    """
    on_gpu = forward.device.type == "cuda"
    try:
        if on_gpu:
            _require_room(settings.gpu_pool_bytes + workspace_bytes, forward.device)
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
    prefetcher = ThreadPrefetcher(store) if pool is None else CudaPrefetcher(store)
    background = ThreadPoolExecutor(1, thread_name_prefix="chunk-store")
    return WorkerStore(store, prefetcher, background, settings.remote is not None)


def _logged(call: Callable[[T], object], argument: T) -> None:
    try:
        call(argument)
    except Exception:
        # Whatever it was: nobody waits for it, and the chunk is where it was.
        logger.exception("the remote server could not be used")


def _require_room(nbytes: int, device: torch.device) -> None:
    """Refuse a pool and a workspace that do not fit beside what is on the device."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    require_free(nbytes, free, total, torch.cuda.memory_reserved(device))
