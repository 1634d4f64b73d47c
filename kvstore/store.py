"""The face of the room: chunk KV over a host tier and a disk tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.availability import Availability
from kvstore.chunk import ChunkKV
from kvstore.disk import DiskTier
from kvstore.errors import ChunkUnavailable, HostBudgetExceeded, StoreError, UnavailableReason
from kvstore.events import EventQueue, Listener, NotStored, Quarantined
from kvstore.files import ShardFile, is_gone
from kvstore.host import HostTier
from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout
from kvstore.pins import PinHandle
from kvstore.single_flight import Claim, SingleFlight
from kvstore.tiers import ChunkRecord, LoadReport, PutReport, Tier

logger = logging.getLogger(__name__)

_ONE_RANK = ShardLayout()


class ChunkStore:
    """Keeps chunk KV on the host and on disk, and says what it can serve. Thread-safe.

    It decides nothing: what is loaded or evicted is the caller's choice. It can serve what was put here and
    what opening or the last `refresh` found on disk. With tensor parallelism a chunk exists once every rank's
    shard is on disk; a store without a disk vouches for its own rank only.

    Args:
        root: the disk tier's folder; None for a store in memory.
        host_budget_bytes: KV bytes the host tier may hold.
        shard: the part of every chunk that this process serves.
        require_writable: refuse a root that cannot be written, instead of serving on without it.
        pinned: keep the host's chunks in page-locked memory, for copies to a GPU.
        vouches_alone: say of this rank's shards alone what is here; whoever asks joins the ranks.

    Attributes:
        shard: as given.
        disk: the disk tier, None if there is none; for verifying and pruning (then `refresh`).

    Raises:
        StoreError: the root is a file, is not writable and has to be, or the budget is negative.
    """

    def __init__(
        self,
        root: Path | None,
        host_budget_bytes: int,
        *,
        shard: ShardLayout = _ONE_RANK,
        require_writable: bool = False,
        pinned: bool = False,
        vouches_alone: bool = False,
    ):
        self.shard = shard
        self.disk = None if root is None else DiskTier(root, require_writable)
        self._host = HostTier(host_budget_bytes, pinned)
        self._events = EventQueue()
        self._availability = Availability(self._host, self._events, shard, root is not None, vouches_alone)
        self._deferred_on_disk: set[ChunkKey] = set()
        # Their locks may be taken before that of the availability, never after.
        self._computations = SingleFlight(lambda key: bool(self._availability.tiers(key)))
        self._loads = SingleFlight(lambda key: self._host.nbytes_of(key) is not None)
        self._closed = False
        self.refresh()

    @property
    def host_budget_bytes(self) -> int:
        """KV bytes the host tier may hold."""
        return self._host.budget_bytes

    @property
    def host_bytes_used(self) -> int:
        """KV bytes on the host, loads in flight included."""
        return self._host.bytes_used

    def lookup(self, identity: ChunkIdentity, shard: ShardLayout | None = None) -> Tier | None:
        """The fastest tier that can serve the chunk, None if none can; no file is touched."""
        return next(iter(self._availability.tiers(identity.key, shard)), None)

    def find(
        self, fingerprint: str, token_ids: Sequence[int], prefixes: Sequence[tuple[int, ...]]
    ) -> tuple[ChunkIdentity | None, UnavailableReason | None]:
        """The chunk of these token ids behind the first prefix that has it; no file is touched.

        Returns:
            The identity and None; or None and why: `tp_layout` (here for another size only), what was wrong
            with its file, `prefix_changed` (here behind other prefixes only), `other_model` (here for other
            models only) or `missing`.
        """
        candidates = [ChunkIdentity(fingerprint, tuple(prefix), tuple(token_ids)) for prefix in prefixes]
        return self._availability.find(candidates, fingerprint, token_ids)

    def put(self, chunk: ChunkKV) -> PutReport:
        """Keep a chunk on disk, if there is one, and on the host, if it fits.

        The tensor must not change afterwards. A disk that does not take it is reported, not raised. A shard of
        another rank goes to disk only.

        Raises:
            StoreError: the store is closed.
        """
        self._check_open()
        disk_reason = None if self.disk is None else self._put_on_disk(self.disk, chunk)
        host_reason = self._put_on_host(chunk)
        on_disk = self.disk is not None and disk_reason is None
        return PutReport(on_disk, host_reason is None, None if on_disk else disk_reason or host_reason)

    def load(self, identity: ChunkIdentity) -> LoadReport:
        """Bring a chunk from disk to the host, verified. Asked for twice at once, it is loaded once.

        Raises:
            ChunkUnavailable: `host_budget`, or why the disk does not serve it; a damaged file is quarantined.
            StoreError: the store is closed.
        """
        self._check_open()
        started = time.perf_counter()
        nbytes = 0
        with self._loads.claim([identity.key]) as claim:
            if claim.mine or claim.wait():
                nbytes = self._load_from_disk(identity)
        return LoadReport(nbytes, time.perf_counter() - started, Tier.DISK if nbytes else Tier.HOST)

    def get(self, identity: ChunkIdentity, shard: ShardLayout | None = None) -> ChunkKV:
        """The chunk's KV, from the host or read through from disk without taking room on the host.

        The tensor is the store's own and must not be written to; it stays valid after an eviction.

        Raises:
            ChunkUnavailable: why it cannot be served; a damaged file is quarantined.
            StoreError: the store is closed.
        """
        self._check_open()
        shard = shard or self.shard
        on_host = Tier.HOST in self._availability.tiers(identity.key, shard)
        chunk = self._host.get(identity.key) if on_host else None
        if chunk is None:
            return self._read_disk(identity, shard)
        if chunk.identity != identity:
            raise ChunkUnavailable(identity.key, UnavailableReason.TOKENS_DIFFER, "the host holds other token ids")
        return chunk

    def pin(self, keys: Sequence[ChunkKey]) -> PinHandle:
        """Keep these chunks from being evicted from any tier, those that are loaded later included."""
        pinned = tuple(dict.fromkeys(keys))
        for key in pinned:
            with self._availability.change(key):
                self._host.pin(key)
        return PinHandle(pinned, self._unpin)

    def pinned_count(self) -> int:
        """How many distinct chunks are pinned."""
        return self._host.pinned_count()

    def evict(self, key: ChunkKey, tier: Tier) -> int:
        """Let a chunk leave a tier: bytes freed now; 0 if it was not there, or leaves when its last pin goes.

        Raises:
            StoreError: the tier is not one of this store's.
        """
        if tier not in (Tier.HOST, Tier.DISK):
            raise StoreError(f"The chunk store evicts from host and disk, not from {tier!r}.")
        with self._availability.change(key):
            if tier is Tier.HOST:
                return self._host.evict(key)
            if not self._host.is_pinned(key):
                return self._delete_from_disk(key)
            # Only what is there now: a file that another process writes later is not the one meant.
            if Tier.DISK in self._availability.tiers(key):
                self._deferred_on_disk.add(key)
            return 0

    def records(self) -> list[ChunkRecord]:
        """Every chunk that can be served, with its KV bytes and the tiers that have it."""
        return self._availability.records()

    def refresh(self) -> None:
        """Scan the disk, so that what other processes added or removed becomes visible.

        Reads the headers of new files only. A file with a damaged header is quarantined.
        """
        if self.disk is None:
            return
        known = self._availability.all_on_disk()
        files = {(file.key, file.shard): file for file in self.disk.files()}
        for found in files.keys() - known:
            self._enter(self.disk, files[found])
        for key in {key for key, _ in known - files.keys()}:
            self._forget_absent(key)

    def recheck(self, key: ChunkKey) -> None:
        """Look whether the files of one chunk are still there; cheaper than `refresh`."""
        self._forget_absent(key)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Send later events to `listener`, in order and outside all locks; returns the way to stop."""
        return self._events.subscribe(listener)

    def claim(self, keys: Sequence[ChunkKey]) -> Claim:
        """Claim the computing of missing chunks, so that two askers of one cause one computation."""
        return self._computations.claim(keys)

    def close(self) -> None:
        """Give the host's memory back; the disk stays as it is. Closing again does nothing."""
        self._closed = True
        self._host.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("The chunk store is closed; open another one.")

    def _put_on_disk(self, disk: DiskTier, chunk: ChunkKV) -> UnavailableReason | None:
        identity = chunk.identity
        try:
            disk.put(chunk)
        except ChunkUnavailable as error:
            logger.warning("not kept on disk: %s", error)
            self._events.queue(NotStored(identity.key, error.reason))
            self._events.deliver()
            return error.reason
        with self._availability.change(identity.key):
            self._deferred_on_disk.discard(identity.key)
            # It was kept, but someone may have evicted it since.
            if not is_gone(disk.path_of(identity.key, identity.fingerprint, chunk.shard)):
                self._availability.enter_on_disk(identity, chunk.shard, chunk.nbytes)
        return None

    def _put_on_host(self, chunk: ChunkKV) -> UnavailableReason | None:
        if chunk.shard != self.shard:
            return UnavailableReason.TP_LAYOUT
        try:
            with self._availability.change(chunk.identity.key):
                self._host.put(chunk)
                self._availability.enter(chunk.identity)
        except HostBudgetExceeded:
            return UnavailableReason.HOST_BUDGET
        return None

    def _load_from_disk(self, identity: ChunkIdentity) -> int:
        try:
            self._host.reserve(identity.key, self._nbytes_on_disk(identity))
            try:
                return self._fill_reservation(identity)
            except BaseException:
                self._host.abandon(identity.key)
                raise
        except HostBudgetExceeded as error:
            raise ChunkUnavailable(identity.key, UnavailableReason.HOST_BUDGET, str(error)) from error

    def _nbytes_on_disk(self, identity: ChunkIdentity) -> int:
        nbytes = self._availability.tiers(identity.key).get(Tier.DISK)
        # Not refreshed since another process put it there: rare, so reading it once more costs less than
        # code.
        return self._read_disk(identity, self.shard).nbytes if nbytes is None else nbytes

    def _fill_reservation(self, identity: ChunkIdentity) -> int:
        chunk = self._read_disk(identity, self.shard)
        with self._availability.change(identity.key):
            self._host.commit(chunk)
            self._availability.enter(identity)
        return chunk.nbytes

    def _read_disk(self, identity: ChunkIdentity, shard: ShardLayout) -> ChunkKV:
        try:
            if self.disk is None:
                raise ChunkUnavailable(identity.key, UnavailableReason.MISSING, "it is not on the host")
            return self.disk.read(identity, shard)
        except ChunkUnavailable as error:
            if self.disk is not None and error.damaged:
                path = self.disk.path_of(identity.key, identity.fingerprint, shard)
                self._quarantine(self.disk, path, shard, error)
            self._forget_absent(identity.key)
            if error.reason is not UnavailableReason.MISSING:
                raise
            reason = self._availability.why_gone(identity.key)
            raise ChunkUnavailable(identity.key, reason, error.detail) from error

    def _quarantine(self, disk: DiskTier, path: Path, shard: ShardLayout, error: ChunkUnavailable) -> None:
        key = ChunkKey(error.key)
        disk.quarantine(path, error.reason, error.detail)
        with self._availability.change(key):
            self._events.queue(Quarantined(key, error.reason, error.detail))
            # Also when it could not be moved: it will not be served again before it is replaced.
            self._availability.leave_disk(key, shard)
        self._availability.remember_why_gone(key, error.reason)

    def _enter(self, disk: DiskTier, file: ShardFile) -> None:
        try:
            header = disk.header_of(file)
        except ChunkUnavailable as error:
            logger.warning("not served: %s", error)
            if error.damaged:
                self._quarantine(disk, file.path, file.shard, error)
            elif error.reason is not UnavailableReason.MISSING:
                self._availability.remember_why_gone(file.key, error.reason)
            return
        with self._availability.change(file.key):
            if not is_gone(file.path):
                self._availability.enter_on_disk(header.identity, header.shard, header.nbytes)

    def _forget_absent(self, key: ChunkKey) -> None:
        """Stop offering those shards of a chunk whose files are gone; those that cannot be looked at stay."""
        fingerprint, shards = self._availability.on_disk(key)
        if self.disk is None or not shards:
            return
        with self._availability.change(key):
            for shard in shards:
                if is_gone(self.disk.path_of(key, fingerprint, shard)):
                    self._availability.leave_disk(key, shard)

    def _delete_from_disk(self, key: ChunkKey) -> int:
        fingerprint, shards = self._availability.on_disk(key)
        if self.disk is None or not shards:
            return 0
        freed = self.disk.delete(key, fingerprint, shards)
        for shard in shards:
            self._availability.leave_disk(key, shard)
        return freed

    def _unpin(self, keys: tuple[ChunkKey, ...]) -> None:
        for key in keys:
            with self._availability.change(key):
                self._host.unpin(key)
                if key in self._deferred_on_disk and not self._host.is_pinned(key):
                    self._deferred_on_disk.discard(key)
                    self._delete_from_disk(key)
