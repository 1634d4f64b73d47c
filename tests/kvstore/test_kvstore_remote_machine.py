"""Any order of storing, reading and deleting gives what a dictionary gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from kvstore_samples import FINGERPRINT, identity_of, same
from redis_server import RedisServer

from kvstore import ChunkKV, ChunkUnavailable, ShardLayout, UnavailableReason, remote
from kvstore.format import chunk_bytes
from kvstore.remote import RemoteTier

SHARDS = ShardLayout(0, 1).all_ranks() + ShardLayout(0, 2).all_ranks()
seeds = st.integers(0, 2)
shards = st.sampled_from(SHARDS)


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path).start()
    yield server
    server.kill()


def test_the_remote_tier_is_a_dictionary(server, monkeypatch):
    monkeypatch.setattr(remote, "PART_BYTES", 100)

    class RemoteMachine(RuleBasedStateMachine):
        @initialize()
        def begin(self):
            with server.client() as client:
                client.flushall()
            self.tier = RemoteTier(server.url, timeout_s=20)
            self.chunks: dict[tuple[int, ShardLayout], ChunkKV] = {}

        def complete(self, seed: int, shard: ShardLayout) -> bool:
            return all((seed, rank) in self.chunks for rank in shard.all_ranks())

        @rule(seed=seeds, shard=shards, layers=st.integers(1, 4), value=st.integers(0, 100))
        def put(self, seed, shard, layers, value):
            chunk = ChunkKV(identity_of(seed), torch.full((layers, 2, 4, 1, 8), float(value)), shard)
            self.tier.put(chunk)
            self.chunks[seed, shard] = chunk

        @rule(seed=seeds, shard=shards)
        def read(self, seed, shard):
            if self.complete(seed, shard):
                assert same(self.tier.read(identity_of(seed), shard), self.chunks[seed, shard])
            else:
                with pytest.raises(ChunkUnavailable) as caught:
                    self.tier.read(identity_of(seed), shard)
                assert caught.value.reason is UnavailableReason.MISSING

        @rule(seed=seeds, shard=shards)
        def holds(self, seed, shard):
            held = self.chunks[seed, shard].nbytes if self.complete(seed, shard) else None
            assert self.tier.holds(identity_of(seed), shard) == held

        @rule(seed=seeds, which=st.lists(shards, unique=True))
        def delete(self, seed, which):
            gone = [self.chunks.pop((seed, shard)) for shard in which if (seed, shard) in self.chunks]
            assert self.tier.delete(identity_of(seed).key, FINGERPRINT, which) == sum(
                len(chunk_bytes(chunk)) for chunk in gone
            )

        @precondition(lambda self: hasattr(self, "tier"))
        @rule()
        def reconnect(self):
            self.tier.close()
            self.tier = RemoteTier(server.url, timeout_s=20)

        def teardown(self):
            if hasattr(self, "tier"):
                with server.client() as client:
                    assert len(client.keys()) == len(self.chunks)
                self.tier.close()

    run_state_machine_as_test(RemoteMachine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None))
