"""The chunk store beside a model of it: budget, pins, tiers, events and content, under any sequence of calls."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvstore_samples import identity_of, same, sample

from kvstore import ChunkStore, ChunkUnavailable, DiskTier, Evicted, Published, StoreError, Tier

ONE = sample(0).nbytes
SEEDS = st.sampled_from([0, 10, 20, 30])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = ChunkStore(self.root, 2 * ONE)
        self.catalogue: set[tuple[str, Tier]] = set()
        self.wrong_events: list[object] = []
        self.store.subscribe(self.follow)
        self.tiers: dict[int, set[Tier]] = {seed: set() for seed in (0, 10, 20, 30)}
        self.leaving: dict[int, set[Tier]] = {seed: set() for seed in self.tiers}
        self.handles: list[tuple[int, object]] = []

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def follow(self, event) -> None:
        if isinstance(event, Published | Evicted):
            place = (event.key, event.tier)
            if isinstance(event, Published) == (place in self.catalogue):
                self.wrong_events.append(event)
            self.catalogue ^= {place}

    def room(self) -> bool:
        return sum(Tier.HOST in tiers for tiers in self.tiers.values()) < 2

    def pinned(self, seed: int) -> bool:
        return any(held == seed for held, _ in self.handles)

    @rule(seed=SEEDS)
    def put(self, seed):
        fits = Tier.HOST in self.tiers[seed] or self.room()
        report = self.store.put(sample(seed))
        assert (report.on_disk, report.on_host, report.reason) == (True, fits, None)
        self.tiers[seed] |= {Tier.DISK, Tier.HOST} if fits else {Tier.DISK}
        self.leaving[seed] -= self.tiers[seed]

    @rule(seed=SEEDS)
    def load(self, seed):
        if Tier.HOST in self.tiers[seed]:
            assert self.store.load(identity_of(seed)).tier_from is Tier.HOST
        elif Tier.DISK in self.tiers[seed] and self.room():
            assert self.store.load(identity_of(seed)).nbytes == ONE
            self.tiers[seed].add(Tier.HOST)
        else:
            with pytest.raises(ChunkUnavailable):
                self.store.load(identity_of(seed))

    @rule(seed=SEEDS)
    def get(self, seed):
        if self.tiers[seed]:
            assert same(self.store.get(identity_of(seed)), sample(seed))
        else:
            with pytest.raises(ChunkUnavailable):
                self.store.get(identity_of(seed))

    @rule(seed=SEEDS)
    def pin(self, seed):
        self.handles.append((seed, self.store.pin([identity_of(seed).key])))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data):
        seed, handle = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        handle.release()
        with pytest.raises(StoreError):
            handle.release()
        if not self.pinned(seed):
            self.tiers[seed] -= self.leaving[seed]
            self.leaving[seed] = set()

    @rule(seed=SEEDS, tier=st.sampled_from([Tier.HOST, Tier.DISK]))
    def evict(self, seed, tier):
        freed = self.store.evict(identity_of(seed).key, tier)
        here = tier in self.tiers[seed]
        assert (freed > 0) == (here and not self.pinned(seed))
        if here and self.pinned(seed):
            self.leaving[seed].add(tier)
        if freed:
            self.tiers[seed].discard(tier)

    @rule(seed=SEEDS, cut=st.booleans())
    def damage_and_meet_it(self, seed, cut):
        path = self.store.disk.path_of(identity_of(seed).key, identity_of(seed).fingerprint, self.store.shard)
        if not path.exists() or Tier.HOST in self.tiers[seed]:
            return
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] if cut else raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(ChunkUnavailable):
            self.store.get(identity_of(seed))
        assert not path.exists()
        self.tiers[seed].discard(Tier.DISK)

    @rule(seed=SEEDS)
    def another_process_puts(self, seed):
        DiskTier(self.root).put(sample(seed))
        self.store.refresh()
        self.tiers[seed].add(Tier.DISK)

    @rule()
    def another_process_prunes(self):
        DiskTier(self.root).prune(max_bytes=0)
        self.store.refresh()
        for tiers in self.tiers.values():
            tiers.discard(Tier.DISK)

    @rule()
    def reopen(self):
        for _, handle in self.handles:
            handle.release()
        self.handles = []
        self.store.close()
        self.catalogue = set()
        for seed, tiers in self.tiers.items():
            tiers -= self.leaving[seed] | {Tier.HOST}
            self.leaving[seed] = set()
        self.store = ChunkStore(self.root, 2 * ONE)
        self.store.subscribe(self.follow)
        self.catalogue = {(record.key, tier) for record in self.store.records() for tier in record.tiers}

    @invariant()
    def the_store_is_what_the_model_says(self):
        expected = {(identity_of(seed).key, tier) for seed, tiers in self.tiers.items() for tier in tiers}
        assert {(record.key, tier) for record in self.store.records() for tier in record.tiers} == expected
        assert self.catalogue == expected
        assert self.wrong_events == []
        on_host = sum(Tier.HOST in tiers for tiers in self.tiers.values())
        assert self.store.host_bytes_used == ONE * on_host <= 2 * ONE
        assert self.store.pinned_count() == len({seed for seed, _ in self.handles})


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
