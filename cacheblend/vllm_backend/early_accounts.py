"""Accounts of requests that reach the client ahead of their results, with vLLM's statistics.

vLLM gives a request's account with its end, and only if the engine ends it. A client that finds a stop string, or
gives up, ends it itself. So the connector also sends each account with the statistics of the step in which it was
known, which is before the first token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from cacheblend.vllm_backend.metrics import ACCOUNTS, STEP

ACCOUNTS_KEPT = 4_096


class EarlyAccounts(StatLoggerBase):
    """Listens to the statistics; vLLM calls `record` with each step's outputs.

    Attributes:
        step_id: of the step whose outputs came last; the connector counts them.
    """

    def __init__(self) -> None:
        self.step_id = 0
        self._by_id: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def made_by_vllm(self, vllm_config: VllmConfig, engine_index: int = 0) -> EarlyAccounts:
        """A factory as vLLM wants one; there is one listener for all."""
        del vllm_config, engine_index
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        """See `StatLoggerBase.record`."""
        del iteration_stats, others, more
        stats = getattr(scheduler_stats, "kv_connector_stats", None) or {}
        self.step_id = stats.get(STEP, {}).get("", self.step_id)
        for request_id, account in stats.get(ACCOUNTS, {}).items():
            for own_id in _own_ids(request_id):
                self._by_id[own_id] = account
        while len(self._by_id) > ACCOUNTS_KEPT:
            self._by_id.popitem(last=False)

    def log_engine_initialized(self) -> None:
        """Nothing to log."""

    def of(self, sequence_id: str) -> dict[str, Any] | None:
        """The newest account of a request; None if none has come."""
        return self._by_id.get(sequence_id)

    def forget(self, sequence_id: str) -> None:
        """Nobody will ask for it again."""
        self._by_id.pop(sequence_id, None)


def _own_ids(request_id: str) -> tuple[str, ...]:
    """What the client may call it: vLLM appends a random word, and puts a number before each of several completions."""
    known, _, _ = request_id.rpartition("-")
    number, separator, rest = known.partition("_")
    return (known, rest) if separator and number.isdigit() else (known,)
