"""Moving chunks to a GPU, without making anyone wait: the worker's half of chunk transfer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.advancing import AdvancingThread
from kvstore.copy_lane import CopyLane, CudaLane
from kvstore.copy_queue import ChunkCopy, CopyQueue
from kvstore.errors import BudgetExceeded, ChunkUnavailable, StoreError, UnavailableReason
from kvstore.gpu import GpuPool
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.pacing import Pace
from kvstore.pins import PinHandle
from kvstore.store import ChunkStore
from kvstore.tiers import Tier
from kvstore.transfer import ThreadPrefetcher, TransferOrder, TransferResult
from kvstore.transfer_log import TransferLog

logger = logging.getLogger(__name__)

BYTES_AHEAD = 256 << 20
"""What the copy engine has before it: nearly five milliseconds of a 55 GB/s link, one decode step of an 8B model. With
less, the prefetcher's own thread wakes for every slice, and decoding waits for it: on an H200, saturated, decoding
took 1.20 times as long with 128 MiB and 1.07 with this."""
SLICE_BYTES = 96 << 20
"""A slice costs the interpreter tens of microseconds, which decoding has to wait for; so a chunk of 640 tokens of an 8B
model is one."""
ADVANCE_S = 2e-3
"""Pause between two looks of the prefetcher's own thread; `BYTES_AHEAD` lasts for it."""
LINK_SHARE = 0.82
"""Of the link, for copies to the GPU pool. Decoding pays for every byte that comes meanwhile, whoever asks for it: on
an H200, plain copies at the link's rate, with no decision behind them, had it take 1.053 times as long."""
LOOK_AGAIN_S = 2e-4
"""Pause between two looks of a thread that asked to wait."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A chunk on its way to the GPU; `copy` and `pin` once it is being copied, `seconds` of its load before that."""

    identity: ChunkIdentity
    tier_from: Tier = Tier.HOST
    seconds: float = 0.0
    copy: ChunkCopy | None = None
    pin: PinHandle | None = None


class CudaPrefetcher:
    """Loads chunks to the host on threads, and copies them on to the GPU pool on a stream of its own.

    Thread-safe. Copies are issued, and what has arrived is published, inside its calls and by a thread of its own,
    which runs while a chunk is on its way to the GPU and sleeps otherwise. The store's listeners are called there as
    well, under the prefetcher's lock: they must not wait for a thread that calls it. No call but `wait`, `wait_any`
    and `close` waits for anything. A chunk's source is pinned while it is copied. A chunk cannot be evicted from the
    GPU before it has arrived; who no longer wants it there cancels it. One whose room is being left (evicted, but
    queued work still reads it) waits for that, and those behind it wait too.

    Args:
        store: a store with a GPU pool, whose host tier is page-locked.
        threads: loads to the host at a time.
        bytes_ahead: bytes issued and not known to have arrived, at most (one slice is always allowed): what a
            cancelled copy or another user of the link may have to wait for.
        slice_bytes: a chunk is copied in slices of whole layers of about this many bytes.
        pace: of all copies to the GPU together; None for `LINK_SHARE` of the link.
        lane: where copies run; None for a CUDA stream on the pool's device.
        own_thread: False leaves all work to the calls: whoever wants copies to go on calls `poll` often.

    Raises:
        StoreError: the store has no GPU pool, or fewer than one thread.
    """

    def __init__(
        self,
        store: ChunkStore,
        threads: int = 4,
        *,
        bytes_ahead: int = BYTES_AHEAD,
        slice_bytes: int = SLICE_BYTES,
        pace: Pace | None = None,
        lane: CopyLane | None = None,
        own_thread: bool = True,
    ):
        if store.gpu is None:
            raise StoreError("A CudaPrefetcher needs a store with a GPU pool; open the store with one.")
        self._store = store
        self._pool: GpuPool = store.gpu
        lane = lane or CudaLane(self._pool.device)
        self._copies = CopyQueue(lane, bytes_ahead, slice_bytes, pace or Pace(LINK_SHARE))
        self._host = ThreadPrefetcher(store, threads)
        self._log = TransferLog()
        # Guards everything here, and is never held while waiting. The locks of the host's prefetcher, the store and
        # the pool may be taken inside it, never the other way round.
        self._changed = threading.Condition()
        self._ordered_to_host: set[ChunkKey] = set()
        # Every flight to the GPU is in one of these.
        self._loading: dict[ChunkKey, _Flight] = {}
        self._queued: dict[ChunkKey, _Flight] = {}
        self._copying: dict[ChunkKey, _Flight] = {}
        self._closed = False
        self._thread = (
            AdvancingThread("chunk-copies", self._changed, self._has_work, self._advance, ADVANCE_S, lane.enter_thread)
            if own_thread
            else None
        )

    def start(self, orders: Sequence[TransferOrder]) -> None:
        """See `AsyncPrefetcher.start`. A chunk ordered to the GPU that is not on the host is loaded there first."""
        for order in orders:
            if order.target not in (Tier.HOST, Tier.GPU):
                raise StoreError(f"A CudaPrefetcher moves to host and gpu, not to {order.target!r}.")
        with self._changed:
            if self._closed:
                raise StoreError("The prefetcher is closed; open another one.")
            for order in orders:
                if order.target is Tier.HOST:
                    self._start_to_host(order)
                else:
                    self._start_to_gpu(order.chunk)
            self._advance()
            self._wake()

    def poll(self) -> list[TransferResult]:
        """See `AsyncPrefetcher.poll`; what has arrived since is published here."""
        with self._changed:
            self._advance()
            return self._log.poll()

    def wait(
        self, keys: Sequence[ChunkKey], timeout_s: float | None, *, target: Tier = Tier.HOST
    ) -> dict[ChunkKey, TransferResult]:
        """See `AsyncPrefetcher.wait`."""
        if target is Tier.HOST:
            return self._host.wait(keys, timeout_s)
        with self._changed, self._log.awaiting(keys, target):
            self._look_until(lambda: not any(self._flight_of(key) for key in keys), timeout_s)
            return self._log.latest([key for key in keys if self._flight_of(key) is None], target)

    def wait_any(self, timeout_s: float, target: Tier | None = None) -> None:
        """See `AsyncPrefetcher.wait_any`."""
        with self._changed:
            self._look_until(lambda: self._log.has_unpolled(target), timeout_s)

    def cancel(self, key: ChunkKey, *, target: Tier = Tier.HOST) -> bool:
        """See `AsyncPrefetcher.cancel`. Calling off a load to the host calls off the copy that waits for it."""
        if target is Tier.HOST:
            return self._host.cancel(key)
        with self._changed:
            return self._cancel_to_gpu(key)

    def in_flight(self, target: Tier | None = None) -> int:
        """See `AsyncPrefetcher.in_flight`; a load on behalf of a copy counts as that copy."""
        with self._changed:
            self._advance()
            to_host = len(self._ordered_to_host) if target in (None, Tier.HOST) else 0
            to_gpu = (self._loading, self._queued, self._copying) if target in (None, Tier.GPU) else ()
            return to_host + sum(map(len, to_gpu))

    def pause(self) -> None:
        """See `AsyncPrefetcher.pause`."""
        with self._changed:
            self._copies.paused = True

    def resume(self) -> None:
        """See `AsyncPrefetcher.resume`."""
        with self._changed:
            if self._copies.paused:
                self._copies.follow_caller()
            self._copies.paused = False
            self._advance()
            self._wake()

    @property
    def bytes_issued(self) -> int:
        """Bytes asked of the copy engine and not known to have arrived."""
        return self._copies.bytes_issued

    def close(self) -> None:
        """See `AsyncPrefetcher.close`."""
        with self._changed:
            self._closed = True
            for key in [*self._loading, *self._queued, *self._copying]:
                self._cancel_to_gpu(key)
        self._host.close()
        with self._changed:
            self._look_until(lambda: not self._copying, None)
        if self._thread is not None:
            self._thread.end()

    def _wake(self) -> None:
        if self._thread is not None:
            self._thread.wake()

    def _flight_of(self, key: ChunkKey) -> _Flight | None:
        return self._loading.get(key) or self._queued.get(key) or self._copying.get(key)

    def _cancel_to_gpu(self, key: ChunkKey) -> bool:
        flight = self._flight_of(key)
        if flight is None or (flight.copy is not None and flight.copy.stopped):
            return False
        if flight.copy is not None:
            self._copies.stop(flight.copy)
            return True
        if self._loading.pop(key, None) and key not in self._ordered_to_host:
            self._host.cancel(key)
        self._queued.pop(key, None)
        self._log.add(TransferResult.failed(key, UnavailableReason.CANCELLED, Tier.GPU))
        return True

    def _start_to_host(self, order: TransferOrder) -> None:
        self._ordered_to_host.add(order.chunk.key)
        self._log.begin(order.chunk.key, Tier.HOST)
        self._host.start([order])

    def _start_to_gpu(self, identity: ChunkIdentity) -> None:
        key = identity.key
        flight = self._flight_of(key)
        if flight is not None:
            if flight.copy is not None and flight.copy.stopped:
                self._copies.resume(flight.copy)
            return
        tier = self._store.lookup(identity)
        if tier is Tier.GPU:
            self._log.add(TransferResult(key, True, None, 0, 0.0, Tier.GPU, Tier.GPU))
            return
        self._log.begin(key, Tier.GPU)
        if tier is Tier.HOST:
            self._queued[key] = _Flight(identity)
        else:
            self._loading[key] = _Flight(identity)
            self._host.start([TransferOrder(identity, Tier.HOST)])

    def _advance(self) -> None:
        """Take every flight as far as it gets without waiting."""
        if self._loading or self._ordered_to_host:
            for result in self._host.poll():
                self._take_host_result(result)
        self._end_copies()
        while self._queued and self._copies.wants_more:
            key, flight = next(iter(self._queued.items()))
            if not self._begin(flight):
                return
            del self._queued[key]

    def _has_work(self) -> bool:
        """Whether looking again may take a flight to the GPU further."""
        if self._copies.paused:
            return self._copies.bytes_issued > 0
        return bool(self._loading or self._queued or self._copying)

    def _look_until(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Look again and again until it is done, or for `timeout_s` seconds, without the lock in between."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._advance()
        while not done() and (end is None or time.monotonic() < end):
            self._changed.wait(LOOK_AGAIN_S)
            self._advance()

    def _take_host_result(self, result: TransferResult) -> None:
        key = result.key
        if key in self._ordered_to_host:
            self._ordered_to_host.discard(key)
            self._log.add(result)
        flight = self._loading.pop(key, None)
        if flight is None:
            return
        if result.ok:
            flight.tier_from, flight.seconds = result.tier_from or Tier.HOST, result.seconds
            self._queued[key] = flight
        else:
            self._log.add(TransferResult.failed(key, result.reason or UnavailableReason.UNREADABLE, Tier.GPU))

    def _begin(self, flight: _Flight) -> bool:
        """Begin a copy, or end the flight; False if its room is still being left."""
        key = flight.identity.key
        pin = self._store.pin([key])
        try:
            copy = self._copy_of(flight.identity)
        except BudgetExceeded as error:
            pin.release()
            if error.soon or any(other.copy is not None and other.copy.stopped for other in self._copying.values()):
                return False
            self._log.add(TransferResult.failed(key, UnavailableReason.GPU_BUDGET, Tier.GPU))
        except ChunkUnavailable as error:
            pin.release()
            self._log.add(TransferResult.failed(key, error.reason, Tier.GPU))
        except Exception:
            # Whatever it was, serving goes on: this chunk is used from the host.
            logger.exception("chunk %s cannot be copied to the GPU", key[:12])
            pin.release()
            self._log.add(TransferResult.failed(key, UnavailableReason.UNREADABLE, Tier.GPU))
        else:
            flight.pin, flight.copy = pin, copy
            self._copying[key] = flight
            self._copies.add(copy)
        return True

    def _copy_of(self, identity: ChunkIdentity) -> ChunkCopy:
        """The pinned chunk with room for it on the GPU."""
        key = identity.key
        source = self._store.held(identity, Tier.HOST)
        if source is None:
            raise ChunkUnavailable(key, UnavailableReason.EVICTED, "it left the host before it was copied")
        return ChunkCopy(source, self._pool.reserve(key, source.kv.shape, source.kv.dtype))

    def _end_copies(self) -> None:
        # On its own, so that nothing refers to a finished copy's memory when the next one needs room.
        for copy in self._copies.advance():
            self._end(self._copying.pop(copy.source.identity.key), copy)

    def _end(self, flight: _Flight, copy: ChunkCopy) -> None:
        assert flight.pin is not None
        key = flight.identity.key
        reason = UnavailableReason.CANCELLED if copy.stopped else self._publish(flight.identity)
        if reason is None:
            seconds = flight.seconds + copy.seconds
            self._log.add(TransferResult(key, True, None, copy.source.nbytes, seconds, flight.tier_from, Tier.GPU))
        else:
            self._pool.abandon(key)
            self._log.add(TransferResult.failed(key, reason, Tier.GPU))
        flight.pin.release()

    def _publish(self, identity: ChunkIdentity) -> UnavailableReason | None:
        """Show what has arrived; why that cannot be."""
        try:
            self._store.publish_on_gpu(identity)
        except StoreError as error:
            logger.warning("chunk %s was copied to the GPU for nothing: %s", identity.key[:12], str(error))
            return UnavailableReason.UNREADABLE
        return None
