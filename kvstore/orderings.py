"""In which order chunks leave a tier. An ordering only proposes; the scheduler decides. Imports no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Protocol

from kvstore.key import ChunkKey


class EvictionOrdering(Protocol):
    """Proposes victims among the chunks of one tier. Not thread-safe: it belongs to one scheduler."""

    def add(self, key: ChunkKey, nbytes: int) -> None:
        """The chunk is now in the tier with this many bytes; also counts as a use."""
        ...

    def touch(self, key: ChunkKey) -> None:
        """The chunk was used; nothing happens if it is not in the tier."""
        ...

    def remove(self, key: ChunkKey) -> None:
        """The chunk left the tier; nothing happens if it was not there."""
        ...

    def victims(self, nbytes: int, keep: Container[ChunkKey]) -> list[ChunkKey]:
        """Chunks outside `keep` that together free at least `nbytes`, best victim first.

        Nothing is removed. Empty when nothing need go, and when even all of them would not be enough: then
        evicting any would be in vain.
        """
        ...


class LruOrdering:
    """Least recently used first. O(1) an operation; `victims` walks the victims and the kept before them."""

    def __init__(self) -> None:
        self._nbytes: OrderedDict[ChunkKey, int] = OrderedDict()

    def add(self, key: ChunkKey, nbytes: int) -> None:
        """Enter the chunk as the most recently used one."""
        self._nbytes[key] = nbytes
        self._nbytes.move_to_end(key)

    def touch(self, key: ChunkKey) -> None:
        """Make the chunk the most recently used one."""
        if key in self._nbytes:
            self._nbytes.move_to_end(key)

    def remove(self, key: ChunkKey) -> None:
        """Forget the chunk."""
        self._nbytes.pop(key, None)

    def victims(self, nbytes: int, keep: Container[ChunkKey]) -> list[ChunkKey]:
        """Least recently used chunks outside `keep` that free `nbytes`; empty if they cannot."""
        chosen: list[ChunkKey] = []
        missing = nbytes
        for key, size in self._nbytes.items():
            if missing <= 0:
                break
            if key not in keep:
                chosen.append(key)
                missing -= size
        return chosen if missing <= 0 else []
