"""Who is held, and how often."""

from __future__ import annotations

from kvstore.errors import StoreError
from kvstore.key import ChunkKey


class Holds:
    """Counts holds on chunks, whether or not the chunks are in the tier."""

    def __init__(self) -> None:
        self._counts: dict[ChunkKey, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def hold(self, key: ChunkKey) -> None:
        """Count one more hold."""
        self._counts[key] = self._counts.get(key, 0) + 1

    def release(self, key: ChunkKey) -> bool:
        """Count one hold less, and return whether it was the last.

        Raises:
            StoreError: the chunk is not held.
        """
        left = self._counts.pop(key, 0) - 1
        if left < 0:
            raise StoreError(f"the chunk {key[:12]} is released but not held; release each hold once.")
        if left:
            self._counts[key] = left
        return not left
