"""A hundred thousand random operations on each memory tier, and on a store over both, beside a model of them.

No leak, no double free, no lost pin, no over-commit: at every step the account is what the model says, and at the
end, when everything is given back, nothing is left and all memory is one piece again.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from kvstore_samples import identity_of

from kvstore import (
    BudgetExceeded,
    ChunkKV,
    ChunkStore,
    Evicted,
    GpuPool,
    HostTier,
    MemoryTier,
    Published,
    StoreError,
    Tier,
)
from kvstore.arena import ALIGNMENT

OPERATIONS = 100_000
IDENTITIES = [identity_of(10 * seed, tokens=1 + seed % 4) for seed in range(12)]
BY_KEY = {identity.key: identity for identity in IDENTITIES}
KEYS = list(BY_KEY)
BUDGET = 9 * 2 * ALIGNMENT


def shape_of(key: str) -> tuple[int, ...]:
    """[layers, 2, tokens, kv_heads, head_dim] of uneven sizes: one to four times `ALIGNMENT` in bf16."""
    return (1, 2, len(BY_KEY[key].token_ids), 1, ALIGNMENT // 4)


def nbytes_of(key: str) -> int:
    return ALIGNMENT * len(BY_KEY[key].token_ids)


def mark_of(key: str) -> float:
    return float(1 + KEYS.index(key))


def chunk_of(key: str, kv: torch.Tensor | None = None) -> ChunkKV:
    kv = torch.empty(shape_of(key), dtype=torch.bfloat16) if kv is None else kv
    return ChunkKV(BY_KEY[key], kv.fill_(mark_of(key)))


def holds_its_own(key: str, kv: torch.Tensor) -> bool:
    return kv[0, 0, 0, 0, 0].item() == kv[-1, -1, -1, -1, -1].item() == mark_of(key)


class Work:
    """What a GPU still does, until it is over."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


class TierModel:
    """One memory tier and what must be true of it. Operations are drawn by name from `random`."""

    def __init__(self, tier: MemoryTier, seed: int):
        self.tier = tier
        self.random = random.Random(seed)
        self.held: set[str] = set()
        self.reserved: dict[str, torch.Tensor] = {}
        self.deferred: dict[str, list[Work]] = {}
        self.pins: Counter[str] = Counter()
        self.leaving: list[tuple[list[Work], int]] = []
        self.readers: list[tuple[str, torch.Tensor]] = []
        self.done: Counter[str] = Counter()

    def used(self) -> int:
        self.leaving = [(works, nbytes) for works, nbytes in self.leaving if not all(work.over for work in works)]
        waiting = sum(nbytes for _, nbytes in self.leaving)
        return waiting + sum(map(nbytes_of, self.held)) + sum(map(nbytes_of, self.reserved))

    def fits(self, key: str) -> bool:
        """Whether the budget has room; free memory may still lie in pieces."""
        return self.used() + nbytes_of(key) <= self.tier.budget_bytes

    def step(self) -> None:
        name = self.random.choice(
            ["put", "reserve", "commit", "abandon", "evict", "evict", "pin", "unpin", "get", "drop", "finish", "budget"]
        )
        getattr(self, name)(self.random.choice(KEYS))
        self.done[name] += 1

    def put(self, key: str) -> None:
        try:
            self.tier.put(chunk_of(key))
        except BudgetExceeded as error:
            self.check_refusal(key, error)
            assert key not in self.held
        else:
            assert key in self.held or self.fits(key)
            self.held.add(key)
            self.deferred.pop(key, None)

    def reserve(self, key: str) -> None:
        try:
            room = self.tier.reserve(key, shape_of(key), torch.bfloat16)
        except StoreError:
            assert key in self.reserved
        except BudgetExceeded as error:
            self.check_refusal(key, error)
        else:
            assert key not in self.reserved
            assert self.fits(key)
            self.reserved[key] = chunk_of(key, room).kv

    def commit(self, key: str) -> None:
        if key in self.reserved:
            self.tier.commit(chunk_of(key, self.reserved.pop(key)))
            self.held.add(key)
        else:
            with pytest.raises(StoreError):
                self.tier.commit(chunk_of(key))

    def abandon(self, key: str) -> None:
        work = Work() if self.random.random() < 0.3 else None
        if key in self.reserved:
            self.tier.abandon(key, after=work)
            del self.reserved[key]
            self.leave(key, [work] if work else [])
        else:
            with pytest.raises(StoreError):
                self.tier.abandon(key, after=work)

    def evict(self, key: str) -> None:
        work = Work() if self.random.random() < 0.3 else None
        works = [work] if work else []
        left = self.tier.evict(key, after=work)
        if key in self.held and not self.pins[key]:
            assert left == nbytes_of(key)
            self.held.discard(key)
            self.leave(key, works)
            return
        assert left == 0
        if key in self.held:
            self.deferred.setdefault(key, []).extend(works)

    def pin(self, key: str) -> None:
        self.tier.pin(key)
        self.pins[key] += 1

    def unpin(self, key: str) -> None:
        if not self.pins[key]:
            with pytest.raises(StoreError):
                self.tier.unpin(key)
            return
        self.pins[key] -= 1
        leaves = not self.pins[key] and key in self.deferred
        assert self.tier.unpin(key) == (nbytes_of(key) if leaves else 0)
        if leaves:
            self.held.discard(key)
            self.leave(key, self.deferred.pop(key))

    def get(self, key: str) -> None:
        chunk = self.tier.get(key)
        assert (chunk is not None) == (key in self.held)
        if chunk is not None and len(self.readers) < 3:
            self.readers.append((key, chunk.k(0)))

    def drop(self, key: str) -> None:
        """A reader is done; what it read was never overwritten."""
        if self.readers:
            key, kv = self.readers.pop(self.random.randrange(len(self.readers)))
            assert kv[0, 0, 0].item() == kv[-1, -1, -1].item() == mark_of(key)

    def finish(self, key: str) -> None:
        """Half of the queued work is over."""
        for works in [*(works for works, _ in self.leaving), *self.deferred.values()]:
            for work in works:
                work.over = work.over or self.random.random() < 0.5

    def budget(self, key: str) -> None:
        if self.random.random() < 0.05:
            self.tier.set_budget(self.random.choice([BUDGET // 2, BUDGET]))

    def leave(self, key: str, works: list[Work]) -> None:
        self.leaving.append((works, nbytes_of(key)))

    def check_refusal(self, key: str, error: BudgetExceeded) -> None:
        assert not self.fits(key) or "in one piece" in str(error)

    def check(self) -> None:
        assert self.tier.bytes_used == self.used() <= BUDGET
        assert len(self.tier.pins) == sum(count > 0 for count in self.pins.values())
        key = self.random.choice(KEYS)
        chunk = self.tier.get(key)
        assert (chunk is not None) == (key in self.held)
        assert chunk is None or holds_its_own(key, chunk.kv)

    def give_everything_back(self) -> None:
        for key in KEYS:
            while self.pins[key]:
                self.unpin(key)
            self.evict(key)
            if key in self.reserved:
                self.abandon(key)
        for works, _ in self.leaving:
            for work in works:
                work.over = True
        self.readers.clear()
        assert self.tier.bytes_used == 0
        assert len(self.tier.pins) == 0
        self.tier.set_budget(BUDGET)
        assert self.tier.largest_free == BUDGET


@pytest.mark.parametrize("make", [HostTier, lambda budget: GpuPool(budget, "cpu")], ids=["host", "gpu"])
def test_a_hundred_thousand_operations_keep_a_memory_tier_and_its_model_the_same(make):
    model = TierModel(make(BUDGET), seed=4)
    for _ in range(OPERATIONS):
        model.step()
        model.check()
    assert min(model.done.values()) > 1_000
    model.give_everything_back()


def test_a_hundred_thousand_operations_keep_a_store_of_two_memory_tiers_true():
    rand = random.Random(5)
    pool = GpuPool(BUDGET // 2, "cpu")
    store = ChunkStore(None, BUDGET, gpu=pool)
    told: set[tuple[str, Tier]] = set()

    def follow(event) -> None:
        assert isinstance(event, Published | Evicted)
        assert isinstance(event, Published) == ((event.key, event.tier) not in told)
        told.symmetric_difference_update({(event.key, event.tier)})

    def promote(identity) -> None:
        """As a prefetcher does: from the host to the pool."""
        if store.lookup(identity) is Tier.HOST:
            source = store.get(identity)
            try:
                pool.reserve(identity.key, source.kv.shape, source.kv.dtype).copy_(source.kv)
            except BudgetExceeded:
                return
            if rand.random() < 0.2:
                pool.abandon(identity.key)
            else:
                store.publish_on_gpu(identity)

    def release(handles) -> None:
        handles.pop(rand.randrange(len(handles))).release()

    store.subscribe(follow)
    handles: list = []
    works: list[Work] = []
    for _ in range(OPERATIONS):
        identity = rand.choice(IDENTITIES)
        match rand.randrange(8):
            case 0 | 1:
                store.put(chunk_of(identity.key))
            case 2 | 3:
                promote(identity)
            case 4:
                works.append(Work())
                store.evict(identity.key, rand.choice([Tier.GPU, Tier.HOST]), after=works[-1])
            case 5 if len(handles) < 5:
                handles.append(store.pin(rand.sample(KEYS, 2)))
            case 6 if handles:
                release(handles)
            case 7:
                while works:
                    works.pop().over = True
        tier = store.lookup(identity)
        assert tier in (Tier.GPU, Tier.HOST, None)
        assert tier is None or holds_its_own(identity.key, store.get(identity).kv)
        assert store.host_bytes_used <= BUDGET
        assert pool.bytes_used <= BUDGET // 2
        assert store.pinned_count() == len({key for handle in handles for key in handle.keys})
    assert told == {(record.key, tier) for record in store.records() for tier in record.tiers}
    while handles:
        release(handles)
    for work in works:
        work.over = True
    for key in KEYS:
        for tier in (Tier.GPU, Tier.HOST):
            store.evict(key, tier)
    assert told == set()
    assert (store.host_bytes_used, pool.bytes_used, store.pinned_count()) == (0, 0, 0)
    assert pool.largest_free == BUDGET // 2
