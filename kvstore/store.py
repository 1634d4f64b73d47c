"""The face of the room: chunk KV on a GPU, on the host, on disk and on a remote server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.availability import Availability
from kvstore.chunk import ChunkKV
from kvstore.cold import ColdTiers
from kvstore.disk import DiskTier
from kvstore.errors import StoreError, UnavailableReason
from kvstore.events import EventQueue, Listener
from kvstore.gpu import GpuPool
from kvstore.host import HostTier
from kvstore.hot import HotTiers
from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout
from kvstore.memory import MemoryTier
from kvstore.pins import Event, PinCounts, PinHandle
from kvstore.remote import RemoteTier
from kvstore.single_flight import Claim, SingleFlight
from kvstore.tiers import ChunkRecord, LoadReport, PutReport, Tier

_ONE_RANK = ShardLayout()


class ChunkStore:
    """Keeps chunk KV in up to four tiers, and says what it can serve. Thread-safe.

    It decides nothing: what is loaded or evicted is the caller's choice. It can serve what was put here, what
    opening or the last `refresh` found on disk, and what `look_remote` or a load found on the remote. With
    tensor parallelism a chunk exists once every rank's shard is on disk; a store without a disk vouches for its
    own rank only.

    Args:
        root: the disk tier's folder; None for a store without a disk.
        host_budget_bytes: KV bytes the host tier may hold.
        shard: the part of every chunk that this process serves.
        require_writable: refuse a root that cannot be written, instead of serving on without it.
        pinned: keep the host's chunks in page-locked memory, for copies to a GPU; see `HostTier`.
        vouches_alone: say of this rank's shards alone what is here; whoever asks joins the ranks.
        gpu: the GPU pool; None for none. The store's pins are the pool's from now on.
        remote: the remote tier; None for none. It is closed with the store.

    Attributes:
        shard: as given.
        disk: the disk tier, None if there is none; for verifying and pruning (then `refresh`).
        gpu: as given; whoever fills it calls `gpu.reserve`, copies, then `publish_on_gpu`.

    Raises:
        StoreError: the root is a file, is not writable and has to be, or the budget is negative or cannot be had.
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
        gpu: GpuPool | None = None,
        remote: RemoteTier | None = None,
    ):
        self.shard = shard
        self.disk = None if root is None else DiskTier(root, require_writable)
        self.gpu = gpu
        self._pins = PinCounts() if gpu is None else gpu.pins
        self._host = HostTier(host_budget_bytes, pinned, self._pins)
        memory: dict[Tier, MemoryTier] = {} if gpu is None else {Tier.GPU: gpu}
        memory[Tier.HOST] = self._host
        self._events = EventQueue()
        self._availability = Availability(memory, self._events, shard, root is not None, vouches_alone)
        self._hot = HotTiers(memory, self._availability, shard)
        self._cold = ColdTiers(self.disk, remote, self._availability, self._events, self._pins)
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

    def set_budget(self, tier: Tier, nbytes: int) -> None:
        """Change how many KV bytes a memory tier may hold.

        A smaller budget counts for new room at once; what is over it stays until it is evicted, and memory that
        was taken as a whole (page-locked or on a GPU) is kept. A larger one takes and locks more, which may
        take its time.

        Raises:
            StoreError: the store has no such memory tier, a negative budget, or there is not so much memory.
        """
        self._hot.set_budget(tier, nbytes)

    def budget_bytes(self, tier: Tier) -> int:
        """How many KV bytes a memory tier may hold; 0 for one that the store does not have."""
        return self._hot.budget_bytes(tier)

    def bytes_used(self, tier: Tier) -> int:
        """KV bytes in a memory tier, transfers in flight included; 0 for one that the store does not have."""
        return self._hot.bytes_used(tier)

    def lookup(self, identity: ChunkIdentity, shard: ShardLayout | None = None) -> Tier | None:
        """The fastest tier that can serve the chunk, None if none can; no file and no server is asked."""
        return next(iter(self._availability.tiers(identity.key, shard)), None)

    def find(
        self, fingerprint: str, token_ids: Sequence[int], prefixes: Sequence[tuple[int, ...]]
    ) -> tuple[ChunkIdentity | None, UnavailableReason | None]:
        """The chunk of these token ids behind the first prefix that has it; no file and no server is asked.

        Returns:
            The identity and None; or None and why: `tp_layout` (here for another size only), what was wrong
            with its file, `prefix_changed` (here behind other prefixes only), `other_model` (here for other
            models only), `unreachable` (the remote, when it was last asked) or `missing`.
        """
        candidates = [ChunkIdentity(fingerprint, tuple(prefix), tuple(token_ids)) for prefix in prefixes]
        return self._availability.find(candidates, fingerprint, token_ids)

    def look_remote(self, identities: Sequence[ChunkIdentity]) -> list[ChunkIdentity]:
        """Ask the remote whether it has these chunks, so that `lookup` and `find` know afterwards.

        One round trip each, so callers who must not wait do this in the background, after a miss. What it does
        not have is not asked for again before the next `refresh` or until it is put there from here.

        Returns:
            Those it has; empty when it cannot be reached, or there is none.
        """
        return self._cold.look_remote(identities, self.shard)

    def put(self, chunk: ChunkKV, *, remote: bool = True) -> PutReport:
        """Keep a chunk on disk and on the remote, if there are such, and on the host, if it fits.

        The tensor must not change afterwards. A tier that does not take it is reported, not raised. A shard of
        another rank does not go to the host.

        Args:
            chunk: the chunk.
            remote: also send it to the remote, and wait for that; False leaves it to a later `put_on_remote`.

        Raises:
            StoreError: the store is closed.
        """
        self._check_open()
        disk_reason = self._cold.put_on_disk(chunk)
        host_reason = self._hot.put_on_host(chunk)
        on_disk = self.disk is not None and disk_reason is None
        on_remote, remote_reason = self.put_on_remote(chunk) if remote else (False, None)
        kept = on_disk or (self.disk is None and on_remote)
        return PutReport(
            on_disk, host_reason is None, None if kept else disk_reason or host_reason, on_remote, remote_reason
        )

    def put_on_remote(self, chunk: ChunkKV) -> tuple[bool, UnavailableReason | None]:
        """Keep a chunk on the remote alone: whether it is there now, and why not; (False, None) without a remote.

        Raises:
            StoreError: the store is closed.
        """
        self._check_open()
        return self._cold.put_on_remote(chunk)

    def load(self, identity: ChunkIdentity) -> LoadReport:
        """Bring a chunk from disk, else from the remote, to the host, verified; straight into its room there.

        Asked for twice at once, it is loaded once. What came from the remote is not written to disk.

        Raises:
            ChunkUnavailable: `host_budget`, or why neither serves it; a damaged file is quarantined.
            StoreError: the store is closed.
        """
        self._check_open()
        started = time.perf_counter()
        nbytes, tier = 0, Tier.HOST
        with self._loads.claim([identity.key]) as claim:
            if claim.mine or claim.wait():
                nbytes, tier = self._hot.load_to_host(
                    identity, lambda allocate: self._cold.read(identity, self.shard, allocate)
                )
        return LoadReport(nbytes, time.perf_counter() - started, tier)

    def get(self, identity: ChunkIdentity, shard: ShardLayout | None = None) -> ChunkKV:
        """The chunk's KV alone; for all else, what is raised too, see `fetch`."""
        return self.fetch(identity, shard)[0]

    def fetch(self, identity: ChunkIdentity, shard: ShardLayout | None = None) -> tuple[ChunkKV, Tier]:
        """The chunk's KV from the fastest tier that has it, and that tier; a cold one's takes no room in memory.

        The tensor is the store's own and must not be written to; it stays valid after an eviction for as long
        as it is held. For work on it that is queued on a GPU, hold a pin as well; see `GpuPool`.

        Raises:
            ChunkUnavailable: why it cannot be served; a damaged file is quarantined.
            StoreError: the store is closed.
        """
        self._check_open()
        shard = shard or self.shard
        hot = self._hot.get(identity, self._availability.tiers(identity.key, shard))
        return self._cold.read(identity, shard) if hot is None else hot

    def held(self, identity: ChunkIdentity, tier: Tier) -> ChunkKV | None:
        """The chunk as this memory tier holds it, None if it does not; asks no other tier. See `fetch`.

        Raises:
            ChunkUnavailable: the tier holds other token ids under its key.
            StoreError: the store is closed.
        """
        self._check_open()
        found = self._hot.get(identity, (tier,))
        return None if found is None else found[0]

    def publish_on_gpu(self, identity: ChunkIdentity) -> None:
        """Serve a chunk from the GPU pool, once the tensor that `gpu.reserve` gave for it is filled.

        Raises:
            StoreError: the store is closed or has no GPU pool, or nothing is reserved; a reservation stays.
        """
        self._check_open()
        self._hot.publish_on_gpu(identity)

    def pin(self, keys: Sequence[ChunkKey]) -> PinHandle:
        """Keep these chunks from being evicted from any tier, those that are loaded later included."""
        pinned = tuple(dict.fromkeys(keys))
        for key in pinned:
            # Not in the middle of an eviction: then the chunk is either gone or stays.
            with self._availability.undisturbed():
                self._pins.pin(key)
        return PinHandle(pinned, self._unpin)

    def pinned_count(self) -> int:
        """How many distinct chunks are pinned."""
        return len(self._pins)

    def evict(self, key: ChunkKey, tier: Tier, after: Event | None = None) -> int:
        """Let a chunk leave a tier: bytes that left now; 0 if it was not there, or leaves when its last pin goes.

        Args:
            key: the chunk.
            tier: what it leaves.
            after: queued work that still reads it; see `MemoryTier.evict`.

        Raises:
            StoreError: the store has no such memory tier.
        """
        if tier in (Tier.DISK, Tier.REMOTE):
            return self._cold.evict(key, tier)
        return self._hot.evict(key, tier, after)

    def records(self) -> list[ChunkRecord]:
        """Every chunk that can be served, with its KV bytes and the tiers that have it."""
        return self._availability.records()

    def refresh(self) -> None:
        """Scan the disk, so that what other processes added or removed becomes visible.

        Reads the headers of new files only. A file with a damaged header is quarantined. The remote is not
        asked, but it may be asked again for what it did not have.
        """
        self._cold.refresh()

    def recheck(self, key: ChunkKey) -> None:
        """Look whether the files of one chunk are still there; cheaper than `refresh`."""
        self._cold.forget_absent(key)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Send later events to `listener`, in order and outside all locks; returns the way to stop."""
        return self._events.subscribe(listener)

    def claim(self, keys: Sequence[ChunkKey]) -> Claim:
        """Claim the computing of missing chunks, so that two askers of one cause one computation."""
        return self._computations.claim(keys)

    def close(self) -> None:
        """Give the memory back and let the remote go; the disk stays as it is. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._hot.clear()
        self._cold.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("The chunk store is closed; open another one.")

    def _unpin(self, keys: tuple[ChunkKey, ...], after: Event | None) -> None:
        for key in keys:
            if self._hot.unpin(key, self._pins, after):
                self._cold.evict_deferred(key)
