"""Whatever the order of events: no copy is read before it is done, and no pin and no room is lost."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvstore_samples import identity_of, same, sample
from manual_lane import ManualLane, Queued, unhurried

from kvstore import ChunkStore, Tier
from kvstore.cuda_transfer import CudaPrefetcher
from kvstore.gpu import GpuPool
from kvstore.transfer import TransferOrder

CHUNKS = {seed: identity_of(seed, tokens=8 + seed // 10) for seed in (0, 10, 20, 30, 40)}
SAMPLES = {seed: sample(seed, tokens=8 + seed // 10) for seed in CHUNKS}
LARGEST = max(chunk.nbytes for chunk in SAMPLES.values())
POOL = 5 * LARGEST // 2 // 512 * 512
"""Room for two chunks or three, so that copies meet a full pool."""

chunks = st.sampled_from(list(CHUNKS))
memory_tiers = st.sampled_from([Tier.HOST, Tier.GPU])


class TransferMachine(RuleBasedStateMachine):
    """Drives one prefetcher over a real store whose device is the CPU."""

    @initialize(bytes_ahead=st.sampled_from([1, LARGEST, 4 * LARGEST]), slices=st.sampled_from([1, 2]))
    def open(self, bytes_ahead, slices):
        self.root = Path(tempfile.mkdtemp())
        self.store = ChunkStore(self.root, 4 * LARGEST, gpu=GpuPool(POOL, "cpu"))
        self.lane = ManualLane()
        self.prefetcher = CudaPrefetcher(
            self.store,
            2,
            bytes_ahead=bytes_ahead,
            slice_bytes=LARGEST // slices,
            pace=unhurried(),
            lane=self.lane,
            own_thread=False,
        )
        self.bound = max(bytes_ahead, LARGEST)
        self.ordered = set()
        self.held = []
        self.reads = []
        for chunk in SAMPLES.values():
            self.store.put(chunk)

    @rule(seeds=st.lists(chunks, min_size=1, max_size=3), tier=memory_tiers)
    def order(self, seeds, tier):
        self.prefetcher.start([TransferOrder(CHUNKS[seed], tier) for seed in seeds])
        self.ordered |= {(CHUNKS[seed].key, tier) for seed in seeds}

    @rule(seed=chunks, tier=memory_tiers)
    def cancel(self, seed, tier):
        self.prefetcher.cancel(CHUNKS[seed].key, target=tier)

    @rule(seed=chunks, tier=memory_tiers, read_behind=st.booleans())
    def evict(self, seed, tier, read_behind):
        if read_behind:
            self.reads.append(Queued())
        self.store.evict(CHUNKS[seed].key, tier, self.reads[-1] if read_behind else None)

    @rule()
    def queued_reads_end(self):
        while self.reads:
            self.reads.pop().over = True

    @rule()
    def pause(self):
        self.prefetcher.pause()

    @rule()
    def resume(self):
        self.prefetcher.resume()

    @rule(copies=st.integers(0, 3))
    def device_works(self, copies):
        self.lane.work(copies)

    @rule()
    def loads_end(self):
        self.prefetcher.wait([identity.key for identity in CHUNKS.values()], timeout_s=30)

    @rule()
    def poll(self):
        self._take(self.prefetcher.poll())

    @rule(seed=chunks)
    def take_and_hold(self, seed):
        """A reader that keeps what it was given, also when the chunk leaves."""
        self.held.append((seed, self.store.get(CHUNKS[seed])))

    @rule()
    def let_go(self):
        self.held.clear()

    @invariant()
    def what_is_served_is_right(self):
        for seed, identity in CHUNKS.items():
            assert same(self.store.get(identity), SAMPLES[seed])
        assert all(same(chunk, SAMPLES[seed]) for seed, chunk in self.held)

    @invariant()
    def bounds_are_kept(self):
        assert self.store.gpu.bytes_used <= POOL
        assert self.store.host_bytes_used <= 4 * LARGEST
        assert self.prefetcher.bytes_issued <= self.bound

    def _take(self, results):
        ended = {(result.key, result.target) for result in results}
        assert len(ended) == len(results)
        assert ended <= self.ordered, "nobody hears of what nobody ordered"
        self.ordered -= ended

    def teardown(self):
        if not hasattr(self, "store"):
            return
        self.prefetcher.resume()
        self.queued_reads_end()
        while self.prefetcher.in_flight():
            self.lane.work()
            self.prefetcher.wait_any(0.001)
        self._take(self.prefetcher.poll())
        assert not self.ordered, "every order has a result"
        self.prefetcher.close()
        self.what_is_served_is_right()
        assert self.store.pinned_count() == 0
        self.held.clear()
        for identity in CHUNKS.values():
            self.store.evict(identity.key, Tier.GPU)
            self.store.evict(identity.key, Tier.HOST)
        assert (self.store.gpu.bytes_used, self.store.host_bytes_used) == (0, 0)
        assert self.store.gpu.largest_free == self.store.gpu.budget_bytes
        self.store.close()
        shutil.rmtree(self.root)


TestTransfers = TransferMachine.TestCase
TestTransfers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
