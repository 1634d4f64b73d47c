"""The cold tiers of a store: chunks on disk and on the remote, and what is known of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.availability import REASONS_KEPT, Availability
from kvstore.chunk import ChunkKV
from kvstore.disk import DiskTier
from kvstore.errors import ChunkUnavailable, UnavailableReason
from kvstore.events import EventQueue, NotStored, Quarantined
from kvstore.files import ShardFile, is_gone
from kvstore.format import Allocate
from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout
from kvstore.pins import PinCounts
from kvstore.remote import RemoteTier
from kvstore.tiers import Tier

logger = logging.getLogger(__name__)


class ColdTiers:
    """Disk and remote behind one face, either of which may be absent. Thread-safe.

    The lock of the availability is never held while the remote is asked.

    Args:
        disk: the disk tier, None if there is none.
        remote: the remote tier, None if there is none.
        availability: follows what is where.
        events: told what the availability does not see.
        pins: keys whose chunks must stay.
    """

    def __init__(
        self,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        availability: Availability,
        events: EventQueue,
        pins: PinCounts,
    ):
        self._disk = disk
        self._remote = remote
        self._availability = availability
        self._events = events
        self._pins = pins
        self._deferred: set[tuple[ChunkKey, Tier]] = set()
        self._not_on_remote: set[ChunkKey] = set()
        self._lock = threading.Lock()

    def read(
        self, identity: ChunkIdentity, shard: ShardLayout, allocate: Allocate | None = None
    ) -> tuple[ChunkKV, Tier]:
        """A chunk from disk, else from the remote, verified, and where it came from.

        Raises:
            ChunkUnavailable: why neither serves it; what is damaged will not be served again.
            Exception: whatever `allocate` raises.
        """
        try:
            return self._read_disk(identity, shard, allocate), Tier.DISK
        except ChunkUnavailable as error:
            why = error
        if self._remote is not None:
            try:
                return self._read_remote(self._remote, identity, shard, allocate), Tier.REMOTE
            except ChunkUnavailable as error:
                why = error if why.reason is UnavailableReason.MISSING else why
        if why.reason is UnavailableReason.MISSING:
            raise ChunkUnavailable(identity.key, self._availability.why_gone(identity.key), why.detail) from why
        raise why

    def put_on_disk(self, chunk: ChunkKV) -> UnavailableReason | None:
        """Keep a chunk on disk; why it does not take it, None if it did or there is no disk."""
        if self._disk is None:
            return None
        identity = chunk.identity
        try:
            self._disk.put(chunk)
        except ChunkUnavailable as error:
            logger.warning("not kept on disk: %s", error)
            self._events.queue(NotStored(identity.key, error.reason))
            self._events.deliver()
            return error.reason
        with self._availability.change(identity.key):
            self._deferred.discard((identity.key, Tier.DISK))
            # It was kept, but someone may have evicted it since.
            if not is_gone(self._disk.path_of(identity.key, identity.fingerprint, chunk.shard)):
                self._availability.enter_on_disk(identity, chunk.shard, chunk.nbytes)
        return None

    def put_on_remote(self, chunk: ChunkKV) -> tuple[bool, UnavailableReason | None]:
        """Keep a chunk on the remote: whether it took it, and why not; (False, None) if there is no remote."""
        if self._remote is None:
            return False, None
        key = chunk.identity.key
        try:
            self._remote.put(chunk)
        except ChunkUnavailable as error:
            logger.warning("not kept on the remote: %s", error)
            return False, error.reason
        with self._lock:
            self._not_on_remote.discard(key)
        with self._availability.change(key):
            self._deferred.discard((key, Tier.REMOTE))
        # It exists there only once the other ranks have put theirs.
        self._is_on_remote(chunk.identity, chunk.shard)
        return True, None

    def look_remote(self, identities: Sequence[ChunkIdentity], shard: ShardLayout) -> list[ChunkIdentity]:
        """Ask the remote for those that nothing serves; see `ChunkStore.look_remote`."""
        return [identity for identity in identities if self._is_on_remote(identity, shard)]

    def evict(self, key: ChunkKey, tier: Tier) -> int:
        """Remove a chunk from disk or from the remote; see `ChunkStore.evict`."""
        with self._availability.change(key):
            if key in self._pins:
                # Only what is there now: a file that another process writes later is not the one meant.
                if tier in self._availability.tiers(key):
                    self._deferred.add((key, tier))
                return 0
            if tier is Tier.DISK:
                return self._delete_from_disk(key)
            fingerprint, shards = self._availability.leave_remote(key)
        return self._delete_from_remote(key, fingerprint, shards)

    def evict_deferred(self, key: ChunkKey) -> None:
        """Let the evictions happen that waited for the key's last pin."""
        for tier in (Tier.DISK, Tier.REMOTE):
            if (key, tier) in self._deferred and key not in self._pins:
                self._deferred.discard((key, tier))
                self.evict(key, tier)

    def refresh(self) -> None:
        """See `ChunkStore.refresh`."""
        with self._lock:
            self._not_on_remote.clear()
        if self._disk is None:
            return
        known = self._availability.all_on_disk()
        files = {(file.key, file.shard): file for file in self._disk.files()}
        for found in files.keys() - known:
            self._enter(self._disk, files[found])
        for key in {key for key, _ in known - files.keys()}:
            self.forget_absent(key)

    def forget_absent(self, key: ChunkKey) -> None:
        """Stop offering those shards of a chunk whose files are gone; those that cannot be looked at stay."""
        fingerprint, shards = self._availability.on_disk(key)
        if self._disk is None or not shards:
            return
        with self._availability.change(key):
            for shard in shards:
                if is_gone(self._disk.path_of(key, fingerprint, shard)):
                    self._availability.leave_disk(key, shard)

    def close(self) -> None:
        """Let the remote go; the disk needs no closing."""
        if self._remote is not None:
            self._remote.close()

    def _read_disk(self, identity: ChunkIdentity, shard: ShardLayout, allocate: Allocate | None) -> ChunkKV:
        try:
            if self._disk is None:
                raise ChunkUnavailable(identity.key, UnavailableReason.MISSING, "it is not in memory")
            return self._disk.read(identity, shard, allocate)
        except ChunkUnavailable as error:
            if self._disk is not None and error.damaged:
                path = self._disk.path_of(identity.key, identity.fingerprint, shard)
                self._quarantine(self._disk, path, shard, error)
            self.forget_absent(identity.key)
            raise

    def _read_remote(
        self, remote: RemoteTier, identity: ChunkIdentity, shard: ShardLayout, allocate: Allocate | None
    ) -> ChunkKV:
        key = identity.key
        try:
            chunk = remote.read(identity, shard, allocate)
        except ChunkUnavailable as error:
            if error.reason is UnavailableReason.MISSING:
                self._note_absence(key)
            elif error.damaged:
                self._remove_damaged(remote, identity, shard, error)
            else:
                self._note_failure(error)
            raise
        with self._availability.change(key):
            self._availability.enter_on_remote(identity, shard, chunk.nbytes)
        return chunk

    def _is_on_remote(self, identity: ChunkIdentity, shard: ShardLayout) -> bool:
        key = identity.key
        if self._remote is None or key in self._not_on_remote:
            return False
        try:
            nbytes = self._remote.holds(identity, shard)
        except ChunkUnavailable as error:
            logger.info("the remote does not say whether it has a chunk: %s", error)
            self._note_failure(error)
            return False
        if nbytes is None:
            self._note_absence(key)
            return False
        with self._availability.change(key):
            self._availability.enter_on_remote(identity, shard, nbytes)
        return True

    def _note_absence(self, key: ChunkKey) -> None:
        with self._lock:
            if len(self._not_on_remote) >= REASONS_KEPT:
                self._not_on_remote.clear()
            self._not_on_remote.add(key)
        with self._availability.change(key):
            self._availability.leave_remote(key)
        if self._availability.why_gone(key) is UnavailableReason.UNREACHABLE:
            self._availability.remember_why_gone(key, UnavailableReason.MISSING)

    def _note_failure(self, error: ChunkUnavailable) -> None:
        key = ChunkKey(error.key)
        if self._availability.why_gone(key) in (UnavailableReason.MISSING, UnavailableReason.EVICTED):
            self._availability.remember_why_gone(key, error.reason)

    def _remove_damaged(
        self, remote: RemoteTier, identity: ChunkIdentity, shard: ShardLayout, error: ChunkUnavailable
    ) -> None:
        """Nothing can be set aside there, so what is wrong is removed; then it can be put again."""
        key = identity.key
        logger.warning("removed from the remote: %s", error)
        remote.delete(key, identity.fingerprint, [shard])
        with self._availability.change(key):
            self._events.queue(Quarantined(key, error.reason, error.detail))
            self._availability.leave_remote(key)
        self._availability.remember_why_gone(key, error.reason)

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

    def _delete_from_disk(self, key: ChunkKey) -> int:
        fingerprint, shards = self._availability.on_disk(key)
        if self._disk is None or not shards:
            return 0
        freed = self._disk.delete(key, fingerprint, shards)
        for shard in shards:
            self._availability.leave_disk(key, shard)
        return freed

    def _delete_from_remote(self, key: ChunkKey, fingerprint: str, shards: Sequence[ShardLayout]) -> int:
        return self._remote.delete(key, fingerprint, shards) if self._remote is not None and shards else 0
