"""The connector's half in each worker: moves chunks, fills pages, takes chunks out of pages."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from cacheblend.vllm_backend.calibration import measure_costs
from cacheblend.vllm_backend.drift import drift_bytes
from cacheblend.vllm_backend.executor import BlendExecutor, workspace_rows
from cacheblend.vllm_backend.forward import LayersForward
from cacheblend.vllm_backend.live_model import model_of
from cacheblend.vllm_backend.messages import BlendOrder, Collected, CollectOrder, StepOrders, WorkerReport
from cacheblend.vllm_backend.placement import staging_bytes
from cacheblend.vllm_backend.ranks import Ranks
from cacheblend.vllm_backend.rows import PromptPages
from cacheblend.vllm_backend.settings import ConnectorSettings
from cacheblend.vllm_backend.worker_store import WorkerStore, open_store
from kvstore.chunk import ChunkKV
from kvstore.errors import StoreError
from kvstore.events import StoreEvent
from kvstore.tiers import Tier

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.005
"""Longest wait of a step that computes nothing while a chunk is on its way; new requests are heard meanwhile."""


class WorkerHalf:
    """Carries out the scheduler half's orders on one rank.

    Args:
        settings: of the connector.
        vllm_config: the engine's.
        kv_cache_config: the engine's.
        root: folder of the store; None keeps chunks in memory.
    """

    def __init__(
        self, settings: ConnectorSettings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, root: Any
    ) -> None:
        self._settings = settings
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._root: Path | None = root
        self._ranks = Ranks()
        self._worker_store: WorkerStore | None = None
        self._events: SimpleQueue[StoreEvent] = SimpleQueue()
        self._forward: LayersForward | None = None
        self._executor: BlendExecutor | None = None
        self._pages_of: dict[str, BlendOrder] = {}
        self._report = WorkerReport()
        self._ended: set[str] = set()
        self._broken_blocks: set[int] = set()

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the pages and the model over.

        Raises:
            BlendError: if the model is not found, its pages cannot be read, or there is no room for the GPU pool, the
                host's chunks or the blend's workspace.
            UnsupportedModelError: if its layers are not all attention layers of one kind.
        """
        model = model_of(self._config)
        _leave_the_cores_alone(self._config.device_config.device_type)
        graph_rows = 0 if self._config.model_config.enforce_eager else self._settings.graph_rows
        with torch.inference_mode():
            forward = LayersForward(
                self._config, self._kv_cache_config, caches, model, self._settings.attention, graph_rows
            )
        most_rows = self._config.scheduler_config.max_num_batched_tokens
        rows_per_step = self._settings.max_rows_per_step or most_rows
        pass_rows = min(most_rows, rows_per_step)
        workspace = staging_bytes(workspace_rows(most_rows, rows_per_step), forward)
        workspace += drift_bytes(pass_rows, forward.kv_heads, forward.head_dim)
        held = open_store(self._settings, self._root, self._ranks.shard, forward, workspace)
        held.store.subscribe(self._events.put)
        self._worker_store = held
        self._forward = forward
        self._executor = BlendExecutor(forward, held.store, self._ranks, most_rows, rows_per_step)
        self._report.costs = measure_costs(forward, self._root, min(most_rows, self._config.model_config.max_model_len))
        logger.info("cacheblend attends with kernel '%s'", forward.kernel)

    def start(self, orders: StepOrders) -> None:
        """Evict, load and blend what this step asks for."""
        self._report.step_id = orders.step_id
        for request_id in orders.cancels:
            self._cancel(request_id)
        store, prefetcher = self._held.store, self._held.prefetcher
        # What leaves a tier makes room for what comes next: no blend that was told done shall still hold it.
        self._take_times(wait=bool(orders.evictions))
        for eviction in orders.evictions:
            # One that is still on its way shall not appear afterwards.
            prefetcher.cancel(eviction.key, target=eviction.tier)
            store.evict(eviction.key, eviction.tier)
        for tier, nbytes in orders.budgets.items():
            self._held.set_budget(tier, nbytes)
        self._held.begin(orders.transfers)
        self._held.look_remote(orders.missed)
        for order in orders.blends:
            self._pages_of[order.request_id] = order
            self._ready()[1].submit(order)
        if self._executor is not None and self._executor.busy:
            # What a blend copies is wanted now: what nobody waits for gets the link afterwards.
            prefetcher.pause()
            try:
                self._advance(self._executor)
            finally:
                prefetcher.resume()
        elif orders.idle and prefetcher.in_flight(Tier.HOST):
            prefetcher.wait_any(IDLE_WAIT_S, Tier.HOST)

    def collect(self, orders: StepOrders) -> None:
        """Take chunks whose KV this step has written out of the pages and put them into the store."""
        for order in orders.collects:
            try:
                collected = self._collect(order)
            except Exception:
                # Whatever it was, no request may fail for a chunk that was not kept.
                logger.exception("chunk %s could not be taken out of the pages", order.identity.key[:12])
                collected = Collected(order.identity.key, False, False, None, len(order.identity.token_ids), 0)
            self._report.collected[order.request_id] = [collected]

    def take_ended(self) -> set[str]:
        """Requests whose pages are no longer written to, for vLLM."""
        ended, self._ended = self._ended, set()
        return ended

    def take_broken_blocks(self) -> set[int]:
        """Pages whose blend failed, for vLLM to compute or to give up."""
        broken, self._broken_blocks = self._broken_blocks, set()
        return broken

    def take_report(self) -> WorkerReport:
        """What the scheduler's half should know of this step; its copies to the GPU begin here.

        The engine asks when it has queued its forward pass. Until then the GPU waits for this thread, which has time
        afterwards.
        """
        self._take_times()
        rank = self._ranks.shard.rank
        report, self._report = self._report, WorkerReport()
        report.budgets = self._held.take_budgets()
        report.transfers = [(rank, result) for result in self._held.take_results()]
        report.events = [(rank, self._events.get_nowait()) for _ in range(self._events.qsize())]
        return report

    def close(self) -> None:
        """Stop the transfers and give host memory back."""
        if self._worker_store is not None:
            self._worker_store.close()

    def _advance(self, executor: BlendExecutor) -> None:
        progress = executor.advance()
        for request_id, error in progress.failed.items():
            order = self._pages_of[request_id]
            first = order.start // self._ready()[0].block_size
            self._broken_blocks.update(order.block_ids[first:])
            self._report.failed[request_id] = error
        self._report.done.update(progress.done)
        for request_id in (*progress.done, *progress.failed):
            del self._pages_of[request_id]
            self._ended.add(request_id)

    def _take_times(self, wait: bool = False) -> None:
        times = self._executor.take_times(wait) if self._executor is not None else {}
        if self._ranks.shard.rank == 0:
            # Ranks come to it in different steps: one tells for all.
            self._report.times.update(times)

    def _cancel(self, request_id: str) -> None:
        if self._executor is not None and self._executor.cancel(request_id):
            del self._pages_of[request_id]
            self._ended.add(request_id)

    def _collect(self, order: CollectOrder) -> Collected:
        forward = self._ready()[0]
        identity = order.identity
        base, tokens = identity.base_position, len(identity.token_ids)
        pages = PromptPages.of((), order.block_ids, forward.block_size)
        slots = pages.slots(torch.arange(base, base + tokens)).to(forward.device)
        layers = [torch.stack(layer.read(slots)) for layer in forward.pages]
        chunk = ChunkKV(identity, torch.stack(layers).cpu(), self._ranks.shard)
        try:
            report = self._held.put(chunk)
        except StoreError as error:
            logger.warning("chunk %s was not kept: %s", identity.key[:12], error)
            return Collected(identity.key, False, False, None, tokens, chunk.nbytes)
        return Collected(identity.key, report.on_disk, report.on_host, report.reason, tokens, chunk.nbytes)

    @property
    def _held(self) -> WorkerStore:
        assert self._worker_store is not None
        return self._worker_store

    def _ready(self) -> tuple[LayersForward, BlendExecutor]:
        assert self._forward is not None
        assert self._executor is not None
        return self._forward, self._executor


def _leave_the_cores_alone(device_type: str) -> None:
    """Have PyTorch compute on one host thread beside a GPU, as vLLM does from 0.30 on, unless the user has said.

    Selection works on the host. The threads of a parallel operation spin when it is over, and where cores are counted
    (containers) the engine then stands still: on an H200's host every second blend by `deviation` took 40 ms longer.
    """
    if device_type == "cuda" and "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > 1:
        logger.info("cacheblend has PyTorch use one host thread instead of %d", torch.get_num_threads())
        torch.set_num_threads(1)
