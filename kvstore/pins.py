"""The handle of a pin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from kvstore.errors import StoreError
from kvstore.key import ChunkKey


class PinHandle:
    """Keeps its chunks from leaving any tier of the store until it is released; made by `ChunkStore.pin`.

    As a context manager it releases at the end of the block, unless `release` was called inside.
    """

    def __init__(self, keys: tuple[ChunkKey, ...], unpin: Callable[[tuple[ChunkKey, ...]], None]):
        self.keys = keys
        self._unpin = unpin
        self._lock = threading.Lock()
        self._released = False

    def release(self) -> None:
        """Give the pins back; evictions that waited for them happen now.

        Raises:
            StoreError: it was released before.
        """
        if not self._release_once():
            raise StoreError("This pin was released before; a pin is given back once.")

    def _release_once(self) -> bool:
        with self._lock:
            if self._released:
                return False
            self._released = True
        self._unpin(self.keys)
        return True

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_once()
