"""Plans as requests of the connector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import BlendReport, PrefillHints
from cacheblend.selectors import selector_params
from cacheblend.vllm_backend.request_format import (
    PARAMS_KEY,
    BlendParams,
    as_transfer_params,
    fingerprint_in,
    segments_of,
)
from kvstore.errors import UnavailableReason

NOT_REPORTED = "not_reported"
"""The reason given where a request asked for blending and its result says nothing: nobody knows what was done."""


@dataclass(frozen=True, slots=True)
class OutgoingPrompt:
    """A prompt as it is sent.

    Attributes:
        token_ids: all of it.
        transfer: `kv_transfer_params`; None for a plain request.
        reasons: why chunks that were asked for as reusable are sent as fresh.
    """

    token_ids: tuple[int, ...]
    transfer: dict[str, Any] | None
    reasons: tuple[str, ...] = ()


def outgoing(
    plan: BlendPlan,
    policy: Policy,
    fingerprint: str,
    namespace: str | None = None,
    hints: PrefillHints | None = None,
) -> OutgoingPrompt:
    """What to send for a plan.

    Args:
        plan: the prompt; which of its chunks there are is the engine's to find out.
        policy: of the request.
        fingerprint: of the model that serves; another model's chunks are fresh rows.
        namespace: where the plan's chunks were put.
        hints: for prediction.

    Raises:
        BlendError: if the selector cannot travel.
    """
    if policy is Policy.FULL:
        return OutgoingPrompt(plan.token_ids, None)
    own = fingerprint_in(fingerprint, namespace)
    foreign = {c.key: UnavailableReason.OTHER_MODEL.value for c in plan.chunks if c.fingerprint != own}
    plan = plan.with_fresh(foreign)
    if not plan.reused:
        return OutgoingPrompt(plan.token_ids, None, plan.fallback_reasons)
    assert plan.selector is not None
    chosen = selector_params(plan.selector)
    prefix, primer = _encoded_behind(plan)
    params = BlendParams(
        segments=segments_of([(len(segment.token_ids), segment.reused) for segment in plan.segments]),
        prefix=prefix,
        primer=primer,
        policy=policy,
        selector=chosen.pop("name", None),
        carry_drift=plan.carry_drift,
        namespace=namespace,
        session=None if hints is None else hints.session_id,
        candidates=() if hints is None else tuple(chunk.token_ids for chunk in hints.candidates),
        **chosen,
    )
    return OutgoingPrompt(plan.token_ids, as_transfer_params(params), plan.fallback_reasons)


def _encoded_behind(plan: BlendPlan) -> tuple[int, tuple[int, ...]]:
    """What the plan's chunks were encoded behind: so many of the prompt's first tokens, and the ids that followed.

    Chunks of a primer were encoded without it, behind what is then the shorter prefix; the engine looks for those as
    well.
    """
    prefixes = {chunk.prefix_ids for chunk in plan.chunks}
    longest = max(prefixes, key=len)
    shorter = min((prefix for prefix in prefixes if longest[: len(prefix)] == prefix), key=len)
    head = plan.token_ids[: plan.reused[0].start if shorter == longest else len(shorter)]
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(longest, head, strict=False)))
    return shared, longest[shared:]


def report_of(prompt: OutgoingPrompt, result: dict[str, Any] | None) -> BlendReport:
    """What became of a prompt.

    Args:
        prompt: as it was sent.
        result: `kv_transfer_params` of its last output.
    """
    if prompt.transfer is None or "collect" in prompt.transfer[PARAMS_KEY]:
        return BlendReport(fallback_reasons=prompt.reasons)
    account = (result or {}).get(PARAMS_KEY)
    if account is None:
        return BlendReport(fallback_reasons=(*prompt.reasons, NOT_REPORTED))
    report = BlendReport(
        mode=account["mode"],
        selector=account["selector"],
        reused_tokens=account["reused_tokens"],
        recomputed_tokens=account["recomputed_tokens"],
        recomputed_ratio=account["recomputed_ratio"],
        bytes_loaded=dict(account["bytes_loaded"]),
        parts_ms=dict(account["parts_ms"]),
        fallback_reasons=(*prompt.reasons, *account["fallback_reasons"]),
    )
    layer_rows = account.get("layer_rows")
    return replace(report, rows=tuple(layer_rows[-1][1])) if layer_rows else report


def require_token_ids(prompt: Any) -> tuple[int, ...]:
    """Bare token ids as a tuple.

    Raises:
        BlendError: if there are none, or something else is among them.
    """
    ids = tuple(prompt)
    if not ids or not all(isinstance(token, int) for token in ids):
        raise BlendError("A prompt is a plan or token ids, at least one; tokenise text first.")
    return ids
