"""What a prefetcher remembers of transfers that have ended. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from kvstore.key import ChunkKey
from kvstore.tiers import Tier
from kvstore.transfer_values import TransferResult

RESULTS_KEPT = 4_096
"""Chunks whose result `wait` still knows after it was polled, those that finished last."""


class TransferLog:
    """The latest result of each chunk and target: until it is polled, while it is awaited, and a while after.

    Not thread-safe; its owner's lock guards it.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[ChunkKey, Tier], TransferResult] = {}
        self._unpolled: dict[tuple[ChunkKey, Tier], TransferResult] = {}
        self._awaited: Counter[tuple[ChunkKey, Tier]] = Counter()

    def add(self, result: TransferResult) -> None:
        """A transfer has ended."""
        flight = (result.key, result.target)
        self._latest.pop(flight, None)
        self._latest[flight] = result
        self._unpolled[flight] = result

    def begin(self, key: ChunkKey, target: Tier) -> None:
        """A transfer begins: how an earlier one ended is not told any more, unless it was polled already."""
        self._unpolled.pop((key, target), None)

    def has_unpolled(self, target: Tier | None = None) -> bool:
        """Whether a transfer has ended since the last poll: one to `target`, None for any."""
        return any(target in (None, ended_in) for _, ended_in in self._unpolled)

    def poll(self) -> list[TransferResult]:
        """Results since the last poll; of those polled, the oldest that nobody awaits are forgotten."""
        finished = list(self._unpolled.values())
        self._unpolled.clear()
        excess = max(len(self._latest) - RESULTS_KEPT, 0)
        for flight in list(islice(self._latest, excess)):
            if flight not in self._awaited:
                del self._latest[flight]
        return finished

    def latest(self, keys: Sequence[ChunkKey], target: Tier) -> dict[ChunkKey, TransferResult]:
        """The latest results of these chunks to one target, without those unknown."""
        return {key: self._latest[key, target] for key in keys if (key, target) in self._latest}

    @contextmanager
    def awaiting(self, keys: Sequence[ChunkKey], target: Tier) -> Iterator[None]:
        """Keep the results of these chunks inside the block, also when they are polled."""
        flights = Counter((key, target) for key in keys)
        self._awaited.update(flights)
        try:
            yield
        finally:
            self._awaited -= flights
