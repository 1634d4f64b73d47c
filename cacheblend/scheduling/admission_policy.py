"""Which plan a request is served with: what there is of it, and whether blending pays. Imports no torch."""

from __future__ import annotations

from cacheblend.plan import BlendPlan, Policy
from cacheblend.scheduling.catalogue import FASTEST_OF, Catalogue
from cacheblend.scheduling.cost_model import CostModel
from kvstore.tiers import Tier

AUTO_FULL_SHARE = 0.85
"""`auto` prefills a prompt when blending would compute at least this share of its rows anyway.

There a blend takes as long as full prefill on an H200, by the line through its cost: at 0.85 of a prompt's rows by
`deviation`, drift carried, and 0.92 by `query` (`eval/results/2026-11-30-h200-whole-passes/ratios.json`).
"""

FULL_CHEAPER = "auto_full_cheaper"
"""Why `auto` prefills: blending would compute so much that nothing is gained."""

LOAD_SLOWER = "auto_load_slower"
"""Why `auto` prefills: the chunks would come more slowly than the prompt is computed."""


def effective_plan(
    plan: BlendPlan, policy: Policy, catalogue: Catalogue, costs: CostModel | None
) -> tuple[BlendPlan, str | None]:
    """The plan a request is served with, and why all of it is prefilled though blending was asked for.

    Under `blend` it follows from the request and the published keys alone. Under `auto`, with costs known, it also
    follows from where the chunks are.
    """
    if policy is Policy.FULL:
        return plan.as_full(), None
    missing = [key for key in plan.keys if key not in catalogue]
    if missing:
        plan = plan.with_fresh(dict.fromkeys(missing, "missing"))
    if policy is not Policy.AUTO or not plan.keys:
        return plan, None
    reason = _why_full(plan, catalogue, costs)
    return (plan, None) if reason is None else (plan.as_full(reason), reason)


def _why_full(plan: BlendPlan, catalogue: Catalogue, costs: CostModel | None) -> str | None:
    assert plan.selector is not None
    reused = [len(segment.token_ids) for segment in plan.segments if segment.identity is not None]
    length = sum([len(segment.token_ids) for segment in plan.segments])
    rows = length - sum(reused) + plan.selector.expected_rows(reused)
    if rows >= AUTO_FULL_SHARE * length:
        return FULL_CHEAPER
    if costs is None:
        return None
    blended = costs.load_seconds(_bytes_by_tier(plan, catalogue)) + costs.recompute_seconds(rows, length)
    return LOAD_SLOWER if blended >= costs.prefill_seconds(length, 0) else None


def _bytes_by_tier(plan: BlendPlan, catalogue: Catalogue) -> dict[Tier, int]:
    """Bytes of each chunk, once, by the fastest tier that has it."""
    nbytes: dict[Tier, int] = {}
    for key in dict.fromkeys(plan.keys):
        size, _, places = catalogue[key]
        tier = FASTEST_OF[places]
        nbytes[tier] = nbytes.get(tier, 0) + size
    return nbytes
