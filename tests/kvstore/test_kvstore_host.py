from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvstore_samples import identity_of, reserve, reserve_and_fill, same, sample

from kvstore import BudgetExceeded, ChunkKV, HostTier, StoreError

ONE = sample(0).nbytes
KEY = identity_of(1).key


def test_a_chunk_that_does_not_fit_is_refused_and_nothing_is_evicted():
    host = HostTier(2 * ONE - 1)
    host.put(sample(1))
    with pytest.raises(BudgetExceeded):
        host.put(sample(2))
    assert same(host.get(KEY), sample(1))
    assert host.bytes_used == ONE


def test_putting_a_chunk_again_takes_no_more_room():
    host = HostTier(ONE)
    host.put(sample(1))
    host.put(sample(1))
    assert host.bytes_used == ONE


def test_a_view_of_a_larger_tensor_is_copied_so_that_the_budget_is_true():
    base = torch.zeros(10, 2, 4, 2, 4)
    host = HostTier(10 * base.nbytes)
    host.put(ChunkKV(identity_of(1), base[:2]))
    assert host.get(KEY).kv.untyped_storage().nbytes() == host.bytes_used


def test_evicting_a_pinned_chunk_waits_for_the_last_pin():
    host = HostTier(ONE)
    host.put(sample(1))
    host.pin(KEY)
    host.pin(KEY)
    assert host.evict(KEY) == 0
    assert host.unpin(KEY) == 0
    assert host.get(KEY) is not None
    assert host.unpin(KEY) == ONE
    assert host.get(KEY) is None
    assert host.bytes_used == 0


def test_putting_a_chunk_calls_off_its_deferred_eviction():
    host = HostTier(ONE)
    host.put(sample(1))
    host.pin(KEY)
    host.evict(KEY)
    host.put(sample(1))
    assert host.unpin(KEY) == 0
    assert host.get(KEY) is not None


def test_a_pin_holds_a_chunk_that_comes_later():
    host = HostTier(ONE)
    host.pin(KEY)
    host.put(sample(1))
    assert host.evict(KEY) == 0
    assert host.unpin(KEY) == ONE


def test_unpinning_twice_is_an_error():
    host = HostTier(ONE)
    host.pin(KEY)
    host.unpin(KEY)
    with pytest.raises(StoreError):
        host.unpin(KEY)


def test_reservations_count_against_the_budget():
    host = HostTier(2 * ONE)
    chunk = reserve_and_fill(host, sample(1))
    host.put(sample(2))
    with pytest.raises(BudgetExceeded):
        host.put(sample(3))
    host.commit(chunk)
    assert host.bytes_used == 2 * ONE
    assert same(host.get(KEY), sample(1))


def test_parallel_reservations_never_exceed_the_budget():
    host = HostTier(5 * ONE)
    got: list[int] = []
    start = threading.Barrier(20)

    def ask(seed: int) -> None:
        start.wait()
        try:
            reserve(host, sample(seed))
        except BudgetExceeded:
            return
        got.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 5
    assert host.bytes_used == 5 * ONE


def test_a_reservation_ends_once():
    host = HostTier(2 * ONE)
    reserve(host, sample(1))
    with pytest.raises(StoreError):
        reserve(host, sample(1))
    host.abandon(KEY)
    with pytest.raises(StoreError):
        host.abandon(KEY)
    with pytest.raises(StoreError):
        host.commit(sample(1))
    assert host.bytes_used == 0


def test_a_negative_budget_is_refused():
    with pytest.raises(StoreError):
        HostTier(-1)


class HostMachine(RuleBasedStateMachine):
    """The host tier beside a model of it that says what must be there."""

    seeds = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.host = HostTier(3 * ONE)
        self.here: set[int] = set()
        self.reserved: dict[int, ChunkKV] = {}
        self.leaving: set[int] = set()
        self.pins = dict.fromkeys(range(5), 0)

    def room(self) -> bool:
        return len(self.here) + len(self.reserved) < 3

    @rule(seed=seeds)
    def put(self, seed):
        if seed in self.here or self.room():
            self.host.put(sample(seed))
            self.here.add(seed)
            self.leaving.discard(seed)
        else:
            with pytest.raises(BudgetExceeded):
                self.host.put(sample(seed))

    @rule(seed=seeds)
    def reserve(self, seed):
        expected = StoreError if seed in self.reserved else None if self.room() else BudgetExceeded
        if expected:
            with pytest.raises(expected):
                reserve(self.host, sample(seed))
        else:
            self.reserved[seed] = reserve_and_fill(self.host, sample(seed))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), commit=st.booleans())
    def end_reservation(self, data, commit):
        seed = data.draw(st.sampled_from(sorted(self.reserved)))
        chunk = self.reserved.pop(seed)
        if commit:
            self.host.commit(chunk)
            self.here.add(seed)
        else:
            self.host.abandon(identity_of(seed).key)

    @rule(seed=seeds)
    def pin(self, seed):
        self.host.pin(identity_of(seed).key)
        self.pins[seed] += 1

    @rule(seed=seeds)
    def unpin(self, seed):
        if not self.pins[seed]:
            with pytest.raises(StoreError):
                self.host.unpin(identity_of(seed).key)
            return
        self.pins[seed] -= 1
        leaves = seed in self.leaving and not self.pins[seed]
        assert self.host.unpin(identity_of(seed).key) == (ONE if leaves else 0)
        if leaves:
            self.leaving.remove(seed)
            self.here.remove(seed)

    @rule(seed=seeds)
    def evict(self, seed):
        leaves = seed in self.here and not self.pins[seed]
        assert self.host.evict(identity_of(seed).key) == (ONE if leaves else 0)
        if leaves:
            self.here.remove(seed)
        elif seed in self.here:
            self.leaving.add(seed)

    @invariant()
    def the_tier_is_what_the_model_says(self):
        assert self.host.bytes_used == ONE * (len(self.here) + len(self.reserved)) <= 3 * ONE
        assert {seed for seed in range(5) if self.host.get(identity_of(seed).key)} == self.here
        assert len(self.host.pins) == sum(count > 0 for count in self.pins.values())


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
