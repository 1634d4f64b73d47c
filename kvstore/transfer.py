"""Moving chunks towards where they are needed, without making anyone wait. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import ChunkUnavailable, StoreError, UnavailableReason
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import Tier
from kvstore.transfer_log import TransferLog
from kvstore.transfer_values import TransferOrder, TransferResult

if TYPE_CHECKING:
    from kvstore.store import ChunkStore

__all__ = ["AsyncPrefetcher", "ThreadPrefetcher", "TransferOrder", "TransferResult"]

logger = logging.getLogger(__name__)


class AsyncPrefetcher(Protocol):
    """Moves chunks between tiers in the background. It decides nothing: a scheduler says what and when.

    What is in flight is counted by chunk and target: however many ask for one chunk in one tier, it is moved once.
    """

    def start(self, orders: Sequence[TransferOrder]) -> None:
        """Begin transfers; returns at once.

        What is in flight is not started again, and goes on if it was being called off; a chunk that is in its target
        already is finished at once.

        Raises:
            StoreError: the prefetcher is closed, or does not serve an order's target; nothing was begun then.
        """
        ...

    def poll(self) -> list[TransferResult]:
        """Transfers finished since the last poll, the latest one of each chunk and target; returns at once.

        What finished and was ordered again before it was polled is told once, when it has finished again.
        """
        ...

    def wait(
        self, keys: Sequence[ChunkKey], timeout_s: float | None, *, target: Tier = Tier.HOST
    ) -> dict[ChunkKey, TransferResult]:
        """Wait until none of these chunks is in flight to `target`, or for `timeout_s` seconds.

        Returns:
            The latest result of each; without those never started, those still in flight, and those polled
            before this call if `RESULTS_KEPT` others have finished since. `poll` sees them too.
        """
        ...

    def wait_any(self, timeout_s: float, target: Tier | None = None) -> None:
        """Wait until there is a result to poll, one to `target` if that is given, or for `timeout_s` seconds."""
        ...

    def cancel(self, key: ChunkKey, *, target: Tier = Tier.HOST) -> bool:
        """Call off a transfer for all who asked; returns at once.

        Its result is `cancelled`: at once if it was queued. What is under way stays in flight until its read or its
        issued copies have ended, then gives its room back and never shows what it brought.

        Returns:
            False if it is not in flight, or called off already.
        """
        ...

    def in_flight(self, target: Tier | None = None) -> int:
        """Transfers queued or under way: those to `target`, None for all."""
        ...

    def pause(self) -> None:
        """Begin and go on with no copy to a GPU until `resume`; returns at once.

        What was asked of the device already ends, and loads to the host go on. Pausing again does nothing.
        """
        ...

    def resume(self) -> None:
        """Go on with copies to a GPU, behind what the caller's current stream was asked for meanwhile."""
        ...

    def close(self) -> None:
        """Call everything off and wait for what is under way. Closing again does nothing."""
        ...


@dataclass(slots=True, eq=False)
class _Load:
    """One load in flight; `called_off` once nobody wants it any more, though it is being read."""

    identity: ChunkIdentity
    future: Future[None] = field(init=False)
    called_off: bool = False


class ThreadPrefetcher:
    """Loads chunks from the store's cold tiers to its host tier on threads of its own. Thread-safe.

    Args:
        store: the store.
        threads: loads at a time; reading and checking a file leave the interpreter to other threads.

    Raises:
        StoreError: fewer than one thread.
    """

    def __init__(self, store: ChunkStore, threads: int = 4):
        if threads < 1:
            raise StoreError(f"A prefetcher with {threads} threads moves nothing; give at least 1.")
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="chunk-prefetch")
        self._changed = threading.Condition()
        self._flying: dict[ChunkKey, _Load] = {}
        self._log = TransferLog()
        self._closed = False

    def start(self, orders: Sequence[TransferOrder]) -> None:
        """See `AsyncPrefetcher.start`; serves orders to the host."""
        for order in orders:
            if order.target is not Tier.HOST:
                raise StoreError(
                    f"A ThreadPrefetcher moves to the host, not to {order.target!r}; use a CudaPrefetcher."
                )
        with self._changed:
            if self._closed:
                raise StoreError("The prefetcher is closed; open another one.")
            for order in orders:
                self._start(order.chunk)

    def poll(self) -> list[TransferResult]:
        """See `AsyncPrefetcher.poll`."""
        with self._changed:
            return self._log.poll()

    def wait(
        self, keys: Sequence[ChunkKey], timeout_s: float | None, *, target: Tier = Tier.HOST
    ) -> dict[ChunkKey, TransferResult]:
        """See `AsyncPrefetcher.wait`."""
        with self._changed, self._log.awaiting(keys, target):
            self._changed.wait_for(lambda: self._flying.keys().isdisjoint(keys), timeout_s)
            return self._log.latest([key for key in keys if key not in self._flying], target)

    def wait_any(self, timeout_s: float, target: Tier | None = None) -> None:
        """See `AsyncPrefetcher.wait_any`."""
        with self._changed:
            self._changed.wait_for(lambda: self._log.has_unpolled(target), timeout_s)

    def cancel(self, key: ChunkKey, *, target: Tier = Tier.HOST) -> bool:
        """See `AsyncPrefetcher.cancel`."""
        with self._changed:
            load = self._flying.get(key) if target is Tier.HOST else None
            if load is None or load.called_off:
                return False
            if load.future.cancel():
                self._finish(TransferResult.failed(key, UnavailableReason.CANCELLED))
            else:
                load.called_off = True
            return True

    def in_flight(self, target: Tier | None = None) -> int:
        """See `AsyncPrefetcher.in_flight`."""
        with self._changed:
            return len(self._flying) if target in (None, Tier.HOST) else 0

    def pause(self) -> None:
        """See `AsyncPrefetcher.pause`: nothing is copied to a GPU here."""

    def resume(self) -> None:
        """See `AsyncPrefetcher.resume`."""

    def close(self) -> None:
        """See `AsyncPrefetcher.close`."""
        with self._changed:
            self._closed = True
            for key in list(self._flying):
                self.cancel(key)
        self._pool.shutdown(wait=True)

    def _start(self, identity: ChunkIdentity) -> None:
        flying = self._flying.get(identity.key)
        if flying is not None:
            flying.called_off = False
        elif self._store.lookup(identity) is Tier.HOST:
            self._finish(TransferResult(identity.key, True, None, 0, 0.0, Tier.HOST))
        else:
            load = _Load(identity)
            self._flying[identity.key] = load
            self._log.begin(identity.key, Tier.HOST)
            self._submit(load)

    def _submit(self, load: _Load) -> None:
        load.future = self._pool.submit(self._load, load)

    def _load(self, load: _Load) -> None:
        result = self._load_result(load.identity)
        with self._changed:
            if not load.called_off:
                self._finish(result)
                return
        if result.nbytes:
            self._store.evict(result.key, Tier.HOST)
        with self._changed:
            if load.called_off:
                self._finish(TransferResult.failed(result.key, UnavailableReason.CANCELLED))
            else:
                # Wanted again while it was being dropped.
                self._submit(load)

    def _load_result(self, identity: ChunkIdentity) -> TransferResult:
        try:
            report = self._store.load(identity)
        except ChunkUnavailable as error:
            return TransferResult.failed(identity.key, error.reason)
        except Exception:
            # Whatever it was, those who wait must hear of it; the chunk's rows are computed instead.
            logger.exception("loading chunk %s failed", identity.key)
            return TransferResult.failed(identity.key, UnavailableReason.UNREADABLE)
        return TransferResult(identity.key, True, None, report.nbytes, report.seconds, report.tier_from)

    def _finish(self, result: TransferResult) -> None:
        self._flying.pop(result.key, None)
        self._log.add(result)
        self._changed.notify_all()
