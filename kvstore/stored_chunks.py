"""Finds chunks in a store whose folder other processes fill as well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.errors import UnavailableReason
from kvstore.key import ChunkIdentity

if TYPE_CHECKING:
    from kvstore.store import ChunkStore

REFRESH_INTERVAL_S = 1.0
"""A scan of the folder is paid by the question that missed a chunk, so there is at most one in this time."""


class StoredChunks:
    """Looks chunks up, and looks at the store's folder again for one that is missing. Thread-safe.

    Args:
        store: the store.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, store: ChunkStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._next_refresh = clock()

    def find(
        self, fingerprint: str, token_ids: Sequence[int], prefixes: Sequence[tuple[int, ...]]
    ) -> tuple[ChunkIdentity | None, UnavailableReason | None]:
        """See `ChunkStore.find`; also finds what another process has put there, seen at most once a second."""
        identity, reason = self._store.find(fingerprint, token_ids, prefixes)
        if identity is not None or not self._may_refresh():
            return identity, reason
        self._store.refresh()
        return self._store.find(fingerprint, token_ids, prefixes)

    def _may_refresh(self) -> bool:
        with self._lock:
            now = self._clock()
            if now < self._next_refresh:
                return False
            self._next_refresh = now + REFRESH_INTERVAL_S
            return True
