"""`CacheBlendConnector`: what vLLM loads. Passes each of its calls to one of the two halves."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import KVCacheConfig

from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.scheduling.predictor_process import ProcessPredictor
from cacheblend.vllm_backend.directory import ChunkDirectory
from cacheblend.vllm_backend.messages import StepOrders, WorkerReport
from cacheblend.vllm_backend.metrics import BlendPromMetrics, BlendStats
from cacheblend.vllm_backend.model_identity import (
    fingerprint_of,
    require_blendable,
    transformers_config,
    weights_folder,
)
from cacheblend.vllm_backend.planner import Planner
from cacheblend.vllm_backend.scheduler_half import SchedulerHalf
from cacheblend.vllm_backend.settings import ConnectorSettings, make_settings
from cacheblend.vllm_backend.traffic import ChunkTraffic
from cacheblend.vllm_backend.versions import require_version
from cacheblend.vllm_backend.worker_half import WorkerHalf
from kvstore.eviction import make_policy
from kvstore.tiers import Tier

logger = logging.getLogger(__name__)


class CacheBlendConnector(KVConnectorBase_V1):
    """Blends the stored KV of chunks into requests that bring a plan; leaves all others alone.

    Args:
        vllm_config: the engine's.
        role: scheduler or worker.
        kv_cache_config: the engine's.

    Raises:
        BlendError: for settings that cannot be used, or a vLLM release that is not supported.
        UnsupportedModelError: for a model or an engine setting that no gate covers.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_version(vllm.__version__)
        require_blendable(vllm_config)
        self._settings = make_settings(self._kv_transfer_config.kv_connector_extra_config)
        root = self._settings.store if weights_folder(vllm_config) is not None else None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _make_scheduler_half(vllm_config, self._settings, root)
            _announce(vllm_config, self._settings, root)
        else:
            self._worker = WorkerHalf(self._settings, vllm_config, kv_cache_config, root)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed off: a dropped chunk is a later miss."""
        return False

    def on_new_request(self, request: Any) -> None:
        """See `KVConnectorBase_V1`."""
        self._scheduler_half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`."""
        return self._scheduler_half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `KVConnectorBase_V1`."""
        if num_external_tokens > 0:
            self._scheduler_half.after_allocation(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `KVConnectorBase_V1`."""
        return self._scheduler_half.build_orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See `KVConnectorBase_V1`."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduler_half.take_report(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnectorBase_V1`."""
        return False, self._scheduler_half.finish(request)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `KVConnectorBase_V1`."""
        self._worker_half.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `KVConnectorBase_V1`: the blends of the step happen here."""
        orders = self._orders()
        # Our own layer calls pass vLLM's hooks as well, which look for metadata.
        self._connector_metadata = None
        try:
            self._worker_half.start(orders)
        finally:
            self._connector_metadata = orders

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request's rows are complete before vLLM schedules it."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do by layer: chunks are taken out of the pages when the step is over."""

    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`: chunks that the step completed are taken out of the pages."""
        self._worker_half.collect(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `KVConnectorBase_V1`."""
        return None, self._worker_half.take_ended() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `KVConnectorBase_V1`."""
        return self._worker_half.take_broken_blocks()

    def build_connector_worker_meta(self) -> WorkerReport:
        """See `KVConnectorBase_V1`."""
        return self._worker_half.take_report()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """See `KVConnectorBase_V1`; the scheduler's half counts for all."""
        return self._scheduler.stats.taken() if self._scheduler is not None else None

    def shutdown(self) -> None:
        """See `KVConnectorBase_V1`."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """See `KVConnectorBase_V1`."""
        return BlendStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """See `KVConnectorBase_V1`."""
        return BlendPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def scheduler_half(self) -> SchedulerHalf:
        """The half that decides; for looking at pins and namespaces from outside."""
        return self._scheduler_half

    @property
    def _scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _worker_half(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders


def _make_scheduler_half(vllm_config: VllmConfig, settings: ConnectorSettings, root: Path | None) -> SchedulerHalf:
    ranks = vllm_config.parallel_config.tensor_parallel_size
    directory = ChunkDirectory(root, ranks)
    budgets = {Tier.HOST: settings.host_budget_bytes}
    if settings.gpu_pool_bytes and vllm_config.device_config.device_type == "cuda":
        budgets[Tier.GPU] = settings.gpu_pool_bytes
    scheduler = ChunkScheduler(budgets, policy=lambda: make_policy(settings.eviction))
    if directory.folder is not None:
        directory.folder.subscribe(scheduler.on_event)
    scheduler.take_over(directory.records())
    stats = BlendStats()
    predictor = ProcessPredictor() if settings.prediction else None
    traffic = ChunkTraffic(scheduler, tuple(budgets), directory, predictor, ranks, stats)
    config = transformers_config(vllm_config)
    bos = config.bos_token_id if isinstance(config.bos_token_id, int) else None
    longest = vllm_config.model_config.max_model_len
    planner = Planner(fingerprint_of(vllm_config), directory, settings, config.num_hidden_layers, longest, bos)
    cache = vllm_config.cache_config
    hash_block = getattr(cache, "hash_block_size", None) or cache.block_size
    return SchedulerHalf(settings, planner, traffic, hash_block, bool(cache.enable_prefix_caching), stats)


def _announce(vllm_config: VllmConfig, settings: ConnectorSettings, root: Path | None) -> None:
    refused: Iterable[str] = ("LoRA requests", "prompt logprobs", "multimodal prompts", "prompts without token ids")
    logger.info(
        "cacheblend blends %s on vLLM %s: selector %s, policy %s, chunks in %s; prefilled whole: %s",
        vllm_config.model_config.model,
        vllm.__version__,
        settings.selector,
        settings.policy.value,
        root if root is not None else "memory only",
        ", ".join(refused),
    )
    if settings.gpu_pool_bytes and vllm_config.device_config.device_type != "cuda":
        logger.warning("cacheblend: there is no GPU, so `gpu_pool_bytes` is not used")
    if settings.store is not None and root is None:
        logger.warning("cacheblend: dummy weights' chunks stay in memory; '%s' is not used", settings.store)
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        logger.warning(
            "cacheblend: a request whose blend fails ends with an error; "
            'set "kv_load_failure_policy": "recompute" to have it prefilled instead'
        )
