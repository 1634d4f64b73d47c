"""What the store remembers of chunks that come and go does not grow without end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvstore_samples import FINGERPRINT, identity_of, sample

from kvstore import ChunkStore, ThreadPrefetcher, Tier, UnavailableReason, availability, transfer_log
from kvstore.transfer import TransferOrder

KEPT = 3
MANY = [identity_of(seed) for seed in range(0, 100, 10)]
KEYS = [identity.key for identity in MANY]
ORDERS = [TransferOrder(identity, Tier.HOST) for identity in MANY]


@pytest.fixture
def store() -> ChunkStore:
    store = ChunkStore(None, len(MANY) * sample(0).nbytes)
    for identity in MANY:
        store.put(sample(identity.token_ids[0]))
    return store


@pytest.fixture
def prefetcher(monkeypatch, store):
    monkeypatch.setattr(transfer_log, "RESULTS_KEPT", KEPT)
    prefetcher = ThreadPrefetcher(store)
    yield prefetcher
    prefetcher.close()


def test_of_results_that_were_polled_only_the_last_are_kept(prefetcher):
    for identity in [*MANY, MANY[0]]:
        prefetcher.start([TransferOrder(identity, Tier.HOST)])
        assert [result.key for result in prefetcher.poll()] == [identity.key]
    assert list(prefetcher.wait(KEYS, timeout_s=0)) == [KEYS[0], *KEYS[-2:]]


def test_results_that_nobody_polled_are_all_kept(prefetcher):
    prefetcher.start(ORDERS)
    assert list(prefetcher.wait(KEYS, timeout_s=0)) == KEYS
    assert [result.key for result in prefetcher.poll()] == KEYS


def test_whoever_waits_gets_every_result_even_while_another_polls(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer_log, "RESULTS_KEPT", KEPT)
    last_may_come = threading.Event()
    store = ChunkStore(tmp_path, len(MANY) * sample(0).nbytes)
    load = store.load

    def load_the_last_later(identity):
        assert identity != MANY[-1] or last_may_come.wait(30)
        return load(identity)

    monkeypatch.setattr(store, "load", load_the_last_later)
    for identity in MANY:
        store.put(sample(identity.token_ids[0]))
        store.evict(identity.key, Tier.HOST)
    prefetcher = ThreadPrefetcher(store)
    prefetcher.start([ORDERS[-1]])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(prefetcher.wait, KEYS, 30)
        while not prefetcher._log._awaited:
            time.sleep(0.001)
        prefetcher.start(ORDERS)
        while prefetcher.in_flight() > 1:
            time.sleep(0.001)
        assert len(prefetcher.poll()) == len(MANY) - 1
        last_may_come.set()
        assert waiting.result().keys() == set(KEYS)
    prefetcher.poll()
    assert len(prefetcher.wait(KEYS, timeout_s=0)) == KEPT
    prefetcher.close()


def test_why_a_chunk_is_gone_is_remembered_for_those_that_went_last(monkeypatch, store):
    monkeypatch.setattr(availability, "REASONS_KEPT", KEPT)
    for key in KEYS:
        store.evict(key, Tier.HOST)
    store.put(sample(MANY[-3].token_ids[0]))
    store.evict(KEYS[-3], Tier.HOST)
    store.put(sample(1000))
    store.evict(identity_of(1000).key, Tier.HOST)
    reasons = {key: store._availability.why_gone(key) for key in KEYS}
    evicted = [key for key, reason in reasons.items() if reason is UnavailableReason.EVICTED]
    assert evicted == [KEYS[-3], KEYS[-1]]
    assert reasons[KEYS[0]] is UnavailableReason.MISSING
    assert store.find(FINGERPRINT, MANY[0].token_ids, [(1,)]) == (None, UnavailableReason.MISSING)
