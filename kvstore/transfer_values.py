"""What a prefetcher is told and what it tells. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.errors import UnavailableReason
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import Tier


class TransferOrder(NamedTuple):
    """Bring this chunk to that memory tier, `Tier.HOST` or `Tier.GPU`."""

    chunk: ChunkIdentity
    target: Tier


class TransferResult(NamedTuple):
    """The end of one transfer.

    Attributes:
        key: the chunk.
        ok: whether it is in the target tier now.
        reason: why not; None when `ok`.
        nbytes: bytes brought to the target, 0 when it was there already or did not come.
        seconds: seconds it was being read and copied, time in queues excluded.
        tier_from: where it came from; None when it did not come.
        target: the tier it was ordered to.
    """

    key: ChunkKey
    ok: bool
    reason: UnavailableReason | None
    nbytes: int
    seconds: float
    tier_from: Tier | None
    target: Tier = Tier.HOST

    @classmethod
    def failed(cls, key: ChunkKey, reason: UnavailableReason, target: Tier = Tier.HOST) -> TransferResult:
        """The end of a transfer that brought nothing."""
        return cls(key, False, reason, 0, 0.0, None, target)
