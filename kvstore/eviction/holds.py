"""Who is held, and how often."""

from __future__ import annotations

from kvstore.errors import StoreError
from kvstore.key import ChunkKey


class Holds(dict[ChunkKey, int]):
    """Counts holds on chunks, whether or not the chunks are in the tier; what is not held is not in it.

    A dict itself, because each change of a rank asks whether the chunk is held.
    """

    def hold(self, key: ChunkKey) -> None:
        """Count one more hold."""
        self[key] = self.get(key, 0) + 1

    def release(self, key: ChunkKey) -> bool:
        """Count one hold less, and return whether it was the last.

        Raises:
            StoreError: the chunk is not held.
        """
        left = self.pop(key, 0) - 1
        if left < 0:
            raise StoreError(f"the chunk {key[:12]} is released but not held; release each hold once.")
        if left:
            self[key] = left
        return not left
