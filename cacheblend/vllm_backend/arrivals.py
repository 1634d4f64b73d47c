"""Chunks on their way to host memory, until every rank has told how it went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.transfer import TransferResult


@dataclass
class Arrival:
    """A load that all ranks have finished.

    Attributes:
        chunk: which one.
        failed: the first rank's result that is not ok, None if the chunk is there.
        bytes_from: bytes moved by all ranks together, by the tier they came from.
    """

    chunk: ChunkIdentity
    failed: TransferResult | None = None
    bytes_from: dict[str, int] = field(default_factory=dict)


class Arrivals:
    """Joins the ranks' results.

    Args:
        ranks: tensor-parallel size.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._flying: dict[ChunkKey, tuple[ChunkIdentity, list[TransferResult]]] = {}

    @property
    def keys(self) -> set[ChunkKey]:
        """Chunks on their way."""
        return set(self._flying)

    def expect(self, chunks: Iterable[ChunkIdentity]) -> None:
        """These loads are ordered."""
        for chunk in chunks:
            self._flying.setdefault(chunk.key, (chunk, []))

    def take(self, results: Iterable[tuple[int, TransferResult]]) -> list[Arrival]:
        """The loads that these results complete."""
        complete = []
        for _, result in results:
            if result.key not in self._flying:
                continue
            chunk, so_far = self._flying[result.key]
            so_far.append(result)
            if len(so_far) == self._ranks:
                del self._flying[result.key]
                complete.append(_join(chunk, so_far))
        return complete


def _join(chunk: ChunkIdentity, results: list[TransferResult]) -> Arrival:
    arrival = Arrival(chunk, next((result for result in results if not result.ok), None))
    for result in results:
        if result.tier_from is not None and result.nbytes:
            tier = result.tier_from.value
            arrival.bytes_from[tier] = arrival.bytes_from.get(tier, 0) + result.nbytes
    return arrival
