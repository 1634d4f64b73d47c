"""Chunks on their way to a memory tier, until every rank has told how it went. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import Tier
from kvstore.transfer_values import TransferOrder, TransferResult


@dataclass
class Arrival:
    """A transfer that all ranks have finished.

    Attributes:
        chunk: which one.
        target: the tier it was ordered to.
        result: of the rank that told last.
        failed: the first rank's result that is not ok, None if the chunk is there.
        bytes_from: bytes moved by all ranks together, by the tier they came from.
    """

    chunk: ChunkIdentity
    target: Tier
    result: TransferResult
    failed: TransferResult | None = None
    bytes_from: dict[str, int] = field(default_factory=dict)


class Arrivals:
    """Joins the ranks' results.

    Args:
        ranks: tensor-parallel size.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._flying: dict[tuple[ChunkKey, Tier], tuple[ChunkIdentity, list[TransferResult]]] = {}

    def __len__(self) -> int:
        return len(self._flying)

    def awaited(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those of these chunks that are on their way to the host."""
        return {key for key in keys if (key, Tier.HOST) in self._flying}

    def expect(self, orders: Iterable[TransferOrder]) -> None:
        """These transfers are ordered."""
        for order in orders:
            self._flying.setdefault((order.chunk.key, order.target), (order.chunk, []))

    def take(self, results: Iterable[tuple[int, TransferResult]]) -> list[Arrival]:
        """The transfers that these results complete."""
        complete = []
        for _, result in results:
            flight = (result.key, result.target)
            if flight not in self._flying:
                continue
            chunk, so_far = self._flying[flight]
            so_far.append(result)
            if len(so_far) == self._ranks:
                del self._flying[flight]
                complete.append(_join(chunk, result.target, so_far))
        return complete


def _join(chunk: ChunkIdentity, target: Tier, results: list[TransferResult]) -> Arrival:
    arrival = Arrival(chunk, target, results[-1], next((result for result in results if not result.ok), None))
    for result in results:
        if result.tier_from is not None and result.nbytes:
            tier = result.tier_from.value
            arrival.bytes_from[tier] = arrival.bytes_from.get(tier, 0) + result.nbytes
    return arrival
