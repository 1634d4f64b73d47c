"""What a worker keeps chunks in: a remote server is served in the background, budgets tell what came of them."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[1] / "kvstore"))

from manual_lane import ManualLane
from redis_server import RedisServer

from cacheblend.vllm_backend.settings import make_settings
from cacheblend.vllm_backend.worker_store import WorkerStore, open_store
from kvstore.chunk import ChunkKV
from kvstore.cuda_transfer import CudaPrefetcher
from kvstore.errors import UnavailableReason
from kvstore.events import Published
from kvstore.gpu import GpuPool
from kvstore.key import ChunkIdentity, ShardLayout
from kvstore.store import ChunkStore
from kvstore.tiers import Tier
from kvstore.transfer import TransferOrder

PATIENCE_S = 30
FORWARD = SimpleNamespace(device=torch.device("cpu"))


def chunk_of(seed: int) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    identity = ChunkIdentity("model", (1,), tuple(range(seed, seed + 5)))
    return ChunkKV(identity, torch.randn(2, 2, 5, 2, 8, generator=generator))


def eventually(said) -> None:
    end = time.monotonic() + PATIENCE_S
    while not said():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def opened():
    stores = []

    def make(**settings):
        store = open_store(make_settings({"host_budget_bytes": 1 << 20, **settings}), None, ShardLayout(), FORWARD, 8)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def test_a_chunk_that_one_engine_collected_reaches_another_over_the_remote_server(tmp_path, opened):
    server = RedisServer(tmp_path).start()
    try:
        chunk = chunk_of(3)
        here, there = opened(remote=server.url), opened(remote=server.url)
        told = []
        there.store.subscribe(told.append)
        assert here.put(chunk).on_host
        eventually(lambda: server.client().dbsize() == 1)
        there.look_remote([chunk.identity])
        eventually(lambda: told)
        assert [(type(event), event.key, event.tier) for event in told] == [
            (Published, chunk.identity.key, Tier.REMOTE)
        ]
        there.prefetcher.start([TransferOrder(chunk.identity, Tier.HOST)])
        (result,) = there.prefetcher.wait([chunk.identity.key], PATIENCE_S).values()
        assert (result.ok, result.tier_from, result.nbytes) == (True, Tier.REMOTE, chunk.nbytes)
        assert torch.equal(there.store.get(chunk.identity).kv, chunk.kv)
    finally:
        server.kill()


def test_a_server_that_is_not_there_delays_nothing_and_costs_no_chunk(tmp_path, opened):
    server = RedisServer(tmp_path).start()
    url = server.url
    server.kill()
    store = opened(remote=url)
    chunk = chunk_of(4)
    assert store.put(chunk).on_host
    store.look_remote([chunk_of(5).identity])
    assert torch.equal(store.store.get(chunk.identity).kv, chunk.kv)
    eventually(
        lambda: store.store.find("model", chunk_of(5).identity.token_ids, [(1,)])[1] is UnavailableReason.UNREACHABLE
    )


def test_a_budget_that_was_changed_is_told_once_as_it_is(opened):
    store = opened()
    store.set_budget(Tier.HOST, 1000)
    assert store.take_budgets() == {Tier.HOST: 1000}
    assert store.take_budgets() == {}
    store.set_budget(Tier.HOST, 5000)
    eventually(lambda: store.store.budget_bytes(Tier.HOST) == 5000)
    eventually(lambda: store.take_budgets() == {Tier.HOST: 5000})


def test_a_tier_that_the_worker_does_not_have_holds_nothing_whatever_its_budget(opened):
    store = opened()
    store.set_budget(Tier.GPU, 1000)
    told = {}
    eventually(lambda: told.update(store.take_budgets()) or told)
    assert told == {Tier.GPU: 0}


def test_loads_begin_when_they_are_ordered_and_copies_to_the_gpu_when_results_are_taken(tmp_path):
    warm, cold = chunk_of(3), chunk_of(4)
    chunks = ChunkStore(tmp_path, 1 << 20, vouches_alone=True, gpu=GpuPool(1 << 20, "cpu"))
    lane = ManualLane()
    prefetcher = CudaPrefetcher(chunks, lane=lane, own_thread=False)
    held = WorkerStore(chunks, prefetcher, ThreadPoolExecutor(1), False)
    chunks.put(warm)
    chunks.put(cold)
    chunks.evict(cold.identity.key, Tier.HOST)
    held.begin([TransferOrder(warm.identity, Tier.GPU), TransferOrder(cold.identity, Tier.HOST)])
    assert prefetcher.in_flight(Tier.GPU) == 0
    prefetcher.wait([cold.identity.key], PATIENCE_S)
    assert chunks.lookup(cold.identity) is Tier.HOST
    assert lane.bytes_asked == 0
    assert [(result.key, result.target) for result in held.take_results()] == [(cold.identity.key, Tier.HOST)]
    assert lane.bytes_asked == warm.nbytes
    lane.work()
    assert [(result.key, result.target, result.ok) for result in held.take_results()] == [
        (warm.identity.key, Tier.GPU, True)
    ]
    assert held.take_results() == []
    assert lane.bytes_asked == warm.nbytes
    held.close()
