"""Arithmetic over accounts of prefills. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.tiers import Tier


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
