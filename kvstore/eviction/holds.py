"""Who is held, and how often."""

from __future__ import annotations

from collections import Counter

from kvstore.errors import StoreError
from kvstore.key import ChunkKey


class Holds:
    """Counts holds on chunks, whether or not the chunks are in the tier."""

    def __init__(self) -> None:
        self._counts: Counter[ChunkKey] = Counter()

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def hold(self, key: ChunkKey) -> None:
        """Count one more hold."""
        self._counts[key] += 1

    def release(self, key: ChunkKey) -> bool:
        """Count one hold less, and return whether it was the last.

        Raises:
            StoreError: the chunk is not held.
        """
        if key not in self._counts:
            raise StoreError(f"the chunk {key[:12]} is released but not held; release each hold once.")
        self._counts[key] -= 1
        if self._counts[key]:
            return False
        del self._counts[key]
        return True
