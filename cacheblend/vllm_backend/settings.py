"""The connector's settings: `kv_connector_extra_config` of `--kv-transfer-config`. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cacheblend.errors import BlendError
from cacheblend.plan import Policy

CONNECTOR_NAME = "CacheBlendConnector"


class ConnectorSettings(BaseModel):
    """How the connector works.

    Attributes:
        store: folder of chunk KV; None keeps chunks in memory only.
        host_budget_bytes: bytes of chunk KV that host memory may hold, of each worker (pinned on a GPU machine).
        gpu_pool_bytes: bytes of chunk KV kept on each GPU beside vLLM's pages; refused at start where they do not fit.
        remote: address of a Redis or Valkey server that keeps chunks as well, `redis://host:6379/0`.
        eviction: what leaves a memory tier first: `gdsf`, `s3fifo` or `lru`.
        prediction: bring chunks that will probably be wanted before they are; by a process of its own.
        accept_budgets: let requests change the byte budgets of `host_budget_bytes` and `gpu_pool_bytes`.
        policy: of requests that name none.
        selector: of requests that name none.
        ratio: of requests that name neither a selector nor a ratio.
        carry_drift: whether rows that are not recomputed move with those that are, of requests that do not say.
        max_rows_per_step: rows recomputed in one engine step, times the share of the layers they pass; what is over
            waits for the next step, in order. None is the engine's `max_num_batched_tokens`.
        attention: `runs` computes rows with the engine's own kernel, `rows` with ours; `auto` is ours on a GPU, but for
            long runs of one prompt where FlashAttention does them faster.
        graph_rows: rows of the largest forward pass that replays CUDA graphs, which cost memory beside vLLM's and a few
            seconds at start; 0 for none. Not used with `enforce_eager`, several ranks, or without our kernel.
        early_accounts: send each request's account with the statistics as soon as it is known, for a client that ends
            requests itself (at stop strings, by aborts) and would not see the result; `VllmRunner` sets it.
        debug_rows: put the recomputed positions into every result, layer by layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Path | None = None
    host_budget_bytes: int = Field(default=4 << 30, ge=0)
    gpu_pool_bytes: int = Field(default=0, ge=0)
    remote: str | None = None
    eviction: Literal["gdsf", "s3fifo", "lru"] = "gdsf"
    prediction: bool = True
    accept_budgets: bool = False
    policy: Policy = Policy.BLEND
    selector: str = "query"
    ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    carry_drift: bool = True
    max_rows_per_step: int | None = Field(default=None, ge=1)
    attention: Literal["auto", "runs", "rows"] = "auto"
    graph_rows: int = Field(default=2048, ge=0)
    early_accounts: bool = False
    debug_rows: bool = False

    @field_validator("store")
    @classmethod
    def _at_home(cls, store: Path | None) -> Path | None:
        """`~` is the user's home: the setting comes from JSON, which no shell expands."""
        return None if store is None else store.expanduser()


def make_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Read the connector's settings.

    Raises:
        BlendError: for an unknown setting or a value out of range, naming it.
    """
    try:
        return ConnectorSettings(**extra_config)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"])) or "settings"
        raise BlendError(
            f"kv_connector_extra_config['{name}'] cannot be {problem['input']!r}: {problem['msg']}."
        ) from None
