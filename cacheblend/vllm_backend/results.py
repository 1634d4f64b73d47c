"""What a request's result says about its prefill: `kv_transfer_params["cacheblend"]` of the response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cacheblend.protocols import BlendReport
from cacheblend.vllm_backend.request_format import FORMAT_VERSION, PARAMS_KEY
from cacheblend.vllm_backend.tracking import Collecting, Tracked
from kvstore.tiers import Tier


def plan_result(tracked: Tracked, report: BlendReport, debug_rows: bool) -> dict[str, Any]:
    """The account of a request that brought a plan.

    Args:
        tracked: the request at its end.
        report: what its prefill did.
        debug_rows: whether to name the reused spans and the recomputed positions.
    """
    account: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "mode": report.mode,
        "policy": tracked.policy.value,
        "selector": report.selector,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "recomputed_ratio": report.recomputed_ratio,
        "bytes_loaded": dict(report.bytes_loaded),
        "parts_ms": dict(report.parts_ms),
        "prefix_cached_tokens": tracked.start,
        "fallback_reasons": list(report.fallback_reasons),
    }
    if debug_rows:
        reused = tracked.plan.reused if tracked.plan is not None and report.mode == "blend" else ()
        account["reused_spans"] = [[span.start, span.end] for span in reused]
        account["layer_rows"] = [[layer, list(rows)] for layer, rows in tracked.layer_rows or ()]
    return {PARAMS_KEY: account}


def collect_result(collecting: Collecting) -> dict[str, Any]:
    """The account of a request that collected a chunk.

    vLLM ends a request of one token before the workers have told where they keep its chunk: `on_disk` and `on_host`
    are None then, as they are for one that ended before its prompt did. Ask for two tokens.
    """
    result = collecting.result
    identity = collecting.identity
    account: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "key": identity.key,
        "tokens": len(identity.token_ids),
        "on_disk": None,
        "on_host": None,
        "reason": None,
    }
    if result is not None:
        account.update(
            on_disk=result.on_disk,
            on_host=result.on_host,
            reason=result.reason.value if result.reason is not None else None,
            nbytes=result.nbytes,
        )
    return {PARAMS_KEY: account}


def budget_result(budgets: Mapping[Tier, int]) -> dict[str, Any]:
    """The account of a request that changes byte budgets: those that hold now, in bytes."""
    held = {tier.value: nbytes for tier, nbytes in budgets.items()}
    return {PARAMS_KEY: {"version": FORMAT_VERSION, "budgets": held}}
