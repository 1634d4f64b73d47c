"""What the connector counts, and its place in vLLM's own Prometheus registry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from cacheblend.plan import Policy
from cacheblend.protocols import BlendReport
from cacheblend.vllm_backend.messages import BlendTimes
from cacheblend.vllm_backend.tracking import Tracked

METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Finished requests that brought a plan.", ("mode",)),
    "hits": ("Chunks whose stored KV was used.", ()),
    "misses": ("Chunks that were asked for and computed afresh.", ("reason",)),
    "fallbacks": ("Requests prefilled whole although blending was asked for.", ("reason",)),
    "bytes_loaded": ("Bytes of stored KV read, by the tier they came from.", ("tier",)),
    "rows_reused": ("Rows taken from stored KV, recomputed ones included.", ()),
    "rows_recomputed": ("Of the rows taken from stored KV, those recomputed.", ()),
    "seconds": ("Seconds of blending.", ("stage",)),
    "collected": ("Chunks collected.", ()),
    "transfers": ("Chunks moved to a memory tier, by how it ended.", ("tier", "outcome")),
    "transfer_bytes": ("Bytes of chunk KV moved to a memory tier.", ("tier",)),
    "evictions": ("Chunks that left a tier, and why.", ("tier", "reason")),
}
"""Counters. name: (what it counts, its labels)."""

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tier_bytes": ("Bytes of chunk KV in a memory tier, transfers in flight included.", ("tier",)),
    "tier_budget_bytes": ("Bytes of chunk KV that a memory tier may hold.", ("tier",)),
    "transfers_in_flight": ("Chunks on their way to a memory tier.", ()),
    "pins": ("Claims that keep chunks from being evicted.", ()),
}
"""Gauges. name: (what it says, its labels)."""

ACCOUNTS = "accounts"
STEP = "step"
_NO_COUNTS = frozenset({ACCOUNTS, STEP})


@dataclass
class BlendStats(KVConnectorStats):
    """Counts since they were last taken, and gauges that have changed: `data[name][label values]`.

    Label values are joined by ":"; "" where a metric has none.

    If early accounts are on, `data["accounts"]` holds accounts of requests by vLLM's id, and `data["step"]`, under "",
    the id of the step whose tokens come with these statistics.
    """

    data: dict[str, dict[str, Any]] = field(default_factory=dict)

    def count(self, name: str, label: str = "", amount: float = 1) -> None:
        """Add to a metric of `METRICS`."""
        values = self.data.setdefault(name, {})
        values[label] = values.get(label, 0) + amount

    def gauge(self, name: str, label: str, value: float) -> None:
        """Set a gauge of `GAUGES`."""
        self.data.setdefault(name, {})[label] = value

    def tell(self, request_id: str, account: dict[str, Any]) -> None:
        """Send a request's account along."""
        self.data.setdefault(ACCOUNTS, {})[request_id] = account

    def tell_step(self, step_id: int) -> None:
        """Send the step's id along."""
        self.data[STEP] = {"": step_id}

    def take(self, report: BlendReport, tracked: Tracked) -> None:
        """Count a finished request."""
        self.count("requests", report.mode)
        plan = tracked.plan or tracked.asked
        if plan is not None:
            self.count("hits", amount=len(plan.keys) if report.mode == "blend" else 0)
            for reason in plan.fallback_reasons:
                self.count("misses", _first_word(reason))
        if report.mode == "full" and tracked.policy is not Policy.FULL:
            self.count("fallbacks", _first_word(tracked.reason or "no_chunk"))
        for tier, nbytes in report.bytes_loaded.items():
            self.count("bytes_loaded", tier, nbytes)
        self.count("rows_reused", amount=report.reused_tokens)
        self.count("rows_recomputed", amount=report.recomputed_tokens)

    def take_times(self, times: BlendTimes) -> None:
        """Count a request's share of the seconds of its blend."""
        for stage, milliseconds in times.parts_ms.items():
            self.count("seconds", stage, milliseconds / 1e3 / times.shared_by)

    def reset(self) -> None:
        """See `KVConnectorStats.reset`."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """See `KVConnectorStats.aggregate`."""
        for name, values in other.data.items():
            if name in _NO_COUNTS or name in GAUGES:
                self.data.setdefault(name, {}).update(values)
                continue
            for label, amount in values.items():
                self.count(name, label, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """See `KVConnectorStats.reduce`: one number a label, for the log."""
        return {
            f"{name}[{label}]" if label else name: round(amount, 3)
            for name, values in self.data.items()
            if name not in _NO_COUNTS
            for label, amount in values.items()
            if amount
        }

    def is_empty(self) -> bool:
        """See `KVConnectorStats.is_empty`."""
        return not self.data

    def taken(self) -> BlendStats | None:
        """These counts, and start anew; None if there are none."""
        if self.is_empty():
            return None
        counts = BlendStats(self.data)
        self.reset()
        return counts


class BlendPromMetrics(KVConnectorPromMetrics):
    """`vllm:cacheblend_*` counters beside vLLM's own.

    Args:
        vllm_config: the engine's.
        metric_types: the classes to make metrics of.
        labelnames: vLLM's own labels.
        per_engine_labelvalues: their values, by engine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = self._made(metric_types[Counter], METRICS, labelnames)
        self._gauges = self._made(metric_types[Gauge], GAUGES, labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See `KVConnectorPromMetrics.observe`."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            for label, amount in values.items() if name not in _NO_COUNTS else ():
                if name in GAUGES:
                    self._gauges[name].labels(*engine, *_label_values(label, GAUGES[name][1])).set(amount)
                else:
                    self._counters[name].labels(*engine, *_label_values(label, METRICS[name][1])).inc(amount)

    @staticmethod
    def _made(make: Any, metrics: dict[str, tuple[str, tuple[str, ...]]], labelnames: list[str]) -> dict[str, Any]:
        return {
            name: make(name=f"vllm:cacheblend_{name}", documentation=text, labelnames=[*labelnames, *labels])
            for name, (text, labels) in metrics.items()
        }


def _label_values(joined: str, names: tuple[str, ...]) -> list[str]:
    return joined.split(":", len(names) - 1) if names else []


def _first_word(reason: str) -> str:
    """A reason without its detail: label values stay few."""
    return reason.partition(":")[0]
