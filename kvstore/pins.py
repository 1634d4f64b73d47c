"""Pins: claims on keys that keep their chunks from leaving. Imports no torch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from kvstore.errors import StoreError
from kvstore.key import ChunkKey


class Event(Protocol):
    """Something that is over at some time, such as work queued on a GPU: `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it is over; returns at once."""
        ...


class PinCounts:
    """How often each key is pinned, whether or not its chunk is anywhere. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[ChunkKey] = Counter()
        self._lock = threading.Lock()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        """How many distinct keys are pinned."""
        return len(self._counts)

    def pin(self, key: ChunkKey) -> None:
        """Claim a key; each pin needs its own `unpin`."""
        with self._lock:
            self._counts[key] += 1

    def unpin(self, key: ChunkKey) -> bool:
        """Give one pin back; whether it was the last.

        Raises:
            StoreError: the key has no pin.
        """
        with self._lock:
            if key not in self._counts:
                raise StoreError(f"Chunk {key[:12]} is not pinned; a pin is given back once.")
            self._counts[key] -= 1
            if self._counts[key]:
                return False
            del self._counts[key]
            return True


class PinHandle:
    """Keeps its chunks from leaving any tier of the store until it is released; made by `ChunkStore.pin`.

    As a context manager it releases at the end of the block, unless `release` was called inside.
    """

    def __init__(self, keys: tuple[ChunkKey, ...], unpin: Callable[[tuple[ChunkKey, ...], Event | None], None]):
        self.keys = keys
        self._unpin = unpin
        self._lock = threading.Lock()
        self._released = False

    def release(self, after: Event | None = None) -> None:
        """Give the pins back; evictions that waited for them happen now.

        Args:
            after: queued work that still reads the chunks; memory is given to nobody else before it is over.

        Raises:
            StoreError: it was released before.
        """
        if not self._release_once(after):
            raise StoreError("This pin was released before; a pin is given back once.")

    def _release_once(self, after: Event | None = None) -> bool:
        with self._lock:
            if self._released:
                return False
            self._released = True
        self._unpin(self.keys, after)
        return True

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_once()
