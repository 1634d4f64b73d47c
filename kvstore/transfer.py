"""Moving chunks towards where they are needed, without making anyone wait. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import ChunkUnavailable, StoreError, UnavailableReason
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import Tier

if TYPE_CHECKING:
    from kvstore.store import ChunkStore

logger = logging.getLogger(__name__)

RESULTS_KEPT = 4_096
"""Chunks whose result `wait` still knows after it was polled, those that finished last."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of one transfer.

    Attributes:
        key: the chunk.
        ok: whether it is on the host now.
        reason: why not; None when `ok`.
        nbytes: bytes moved, 0 when it was there already or did not come.
        seconds: wall seconds the load took, time in the queue excluded.
        tier_from: where it came from; None when it did not come.
    """

    key: ChunkKey
    ok: bool
    reason: UnavailableReason | None
    nbytes: int
    seconds: float
    tier_from: Tier | None


class AsyncPrefetcher(Protocol):
    """Moves chunks to the host in the background. It decides nothing: a scheduler says what and when."""

    def start(self, identities: Sequence[ChunkIdentity]) -> None:
        """Begin transfers; returns at once.

        A chunk in flight is not started again; one on the host is finished at once.

        Raises:
            StoreError: the prefetcher is closed.
        """
        ...

    def poll(self) -> list[TransferResult]:
        """Transfers finished since the last poll, the latest one of each chunk; returns at once."""
        ...

    def wait(self, keys: Sequence[ChunkKey], timeout_s: float | None) -> dict[ChunkKey, TransferResult]:
        """Wait until none of these chunks is in flight, or for `timeout_s` seconds.

        Returns:
            The latest result of each; without those never started, those still in flight, and those polled
            before this call if `RESULTS_KEPT` others have finished since. `poll` sees them too.
        """
        ...

    def wait_any(self, timeout_s: float) -> None:
        """Wait until there is something to poll, or for `timeout_s` seconds."""
        ...

    def cancel(self, key: ChunkKey) -> bool:
        """Call off a transfer for all who asked, with result `cancelled`; False once it has begun."""
        ...

    def in_flight(self) -> int:
        """Transfers queued or running."""
        ...

    def close(self) -> None:
        """Call off what is queued and wait for what is running. Closing again does nothing."""
        ...


class ThreadPrefetcher:
    """Loads chunks from the store's disk to its host tier on threads of its own. Thread-safe.

    Args:
        store: the store.
        threads: loads at a time.

    Raises:
        StoreError: fewer than one thread.
    """

    def __init__(self, store: ChunkStore, threads: int = 2):
        if threads < 1:
            raise StoreError(f"A prefetcher with {threads} threads moves nothing; give at least 1.")
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="chunk-prefetch")
        self._changed = threading.Condition()
        self._flying: dict[ChunkKey, Future[None]] = {}
        self._latest: dict[ChunkKey, TransferResult] = {}
        self._unpolled: dict[ChunkKey, TransferResult] = {}
        self._awaited: Counter[ChunkKey] = Counter()
        self._closed = False

    def start(self, identities: Sequence[ChunkIdentity]) -> None:
        """See `AsyncPrefetcher.start`."""
        with self._changed:
            if self._closed:
                raise StoreError("The prefetcher is closed; open another one.")
            for identity in identities:
                key = identity.key
                if key in self._flying:
                    continue
                if self._store.lookup(identity) is Tier.HOST:
                    self._finish(TransferResult(key, True, None, 0, 0.0, Tier.HOST))
                else:
                    self._flying[key] = self._pool.submit(self._load, identity)

    def poll(self) -> list[TransferResult]:
        """See `AsyncPrefetcher.poll`."""
        with self._changed:
            finished = list(self._unpolled.values())
            self._unpolled.clear()
            self._forget_old_results()
            return finished

    def wait(self, keys: Sequence[ChunkKey], timeout_s: float | None) -> dict[ChunkKey, TransferResult]:
        """See `AsyncPrefetcher.wait`."""
        with self._changed:
            self._awaited.update(keys)
            try:
                self._changed.wait_for(lambda: self._flying.keys().isdisjoint(keys), timeout_s)
                return {key: self._latest[key] for key in keys if key in self._latest and key not in self._flying}
            finally:
                self._awaited -= Counter(keys)

    def wait_any(self, timeout_s: float) -> None:
        """See `AsyncPrefetcher.wait_any`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._unpolled), timeout_s)

    def cancel(self, key: ChunkKey) -> bool:
        """See `AsyncPrefetcher.cancel`."""
        with self._changed:
            future = self._flying.get(key)
            if future is None or not future.cancel():
                return False
            self._finish(_failed(key, UnavailableReason.CANCELLED))
            return True

    def in_flight(self) -> int:
        """See `AsyncPrefetcher.in_flight`."""
        with self._changed:
            return len(self._flying)

    def close(self) -> None:
        """See `AsyncPrefetcher.close`."""
        with self._changed:
            self._closed = True
            queued = list(self._flying)
        for key in queued:
            self.cancel(key)
        self._pool.shutdown(wait=True)

    def _load(self, identity: ChunkIdentity) -> None:
        result = self._load_result(identity)
        with self._changed:
            self._finish(result)

    def _load_result(self, identity: ChunkIdentity) -> TransferResult:
        try:
            report = self._store.load(identity)
        except ChunkUnavailable as error:
            return _failed(identity.key, error.reason)
        except Exception:
            # Whatever it was, those who wait must hear of it; the chunk's rows are computed instead.
            logger.exception("loading chunk %s failed", identity.key)
            return _failed(identity.key, UnavailableReason.UNREADABLE)
        return TransferResult(identity.key, True, None, report.nbytes, report.seconds, report.tier_from)

    def _finish(self, result: TransferResult) -> None:
        self._flying.pop(result.key, None)
        self._latest.pop(result.key, None)
        self._latest[result.key] = result
        self._unpolled[result.key] = result
        self._changed.notify_all()

    def _forget_old_results(self) -> None:
        """After a poll: everything that is known has been polled."""
        excess = max(len(self._latest) - RESULTS_KEPT, 0)
        for key in list(islice(self._latest, excess)):
            if key not in self._awaited:
                del self._latest[key]


def _failed(key: ChunkKey, reason: UnavailableReason) -> TransferResult:
    return TransferResult(key, False, reason, 0, 0.0, None)
