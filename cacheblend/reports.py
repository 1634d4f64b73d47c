"""Arithmetic over accounts of prefills. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore.tiers import Tier

if TYPE_CHECKING:
    from cacheblend.plan import BlendPlan
    from cacheblend.protocols import BlendReport
    from cacheblend.selectors.selection import RowSelection


def note_blend(report: BlendReport, plan: BlendPlan, selection: RowSelection) -> None:
    """Enter what was reused and recomputed.

    Args:
        report: of the prompt.
        plan: the effective one.
        selection: of its rows, once the last layer ran.
    """
    assert plan.selector is not None
    report.mode = "blend"
    report.selector = plan.rule
    report.reused_tokens = plan.reused_tokens
    report.rows = selection.rows
    report.recomputed_tokens = len(selection.rows)
    report.recomputed_ratio = selection.ratio


def bytes_by_first_tier(read: Mapping[str, int], loaded: Mapping[str, int]) -> dict[str, int]:
    """Count bytes that were brought to the host for a request by the tier they came from.

    Args:
        read: bytes read for the prefill, by the tier they were read from.
        loaded: of these, bytes brought to the host before, by the tier they came from.
    """
    by_tier = Counter(read)
    for tier, nbytes in loaded.items():
        by_tier[Tier.HOST.value] -= nbytes
        by_tier[tier] += nbytes
    return {tier: nbytes for tier, nbytes in by_tier.items() if nbytes > 0}
