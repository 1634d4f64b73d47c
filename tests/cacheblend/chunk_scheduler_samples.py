"""Chunks, records, schedulers and events for the tests of `ChunkScheduler`."""

from __future__ import annotations

from cacheblend_samples import identity_of

from cacheblend.protocols import Advice
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from kvstore.events import Evicted, Published
from kvstore.eviction import LruPolicy
from kvstore.tiers import ChunkRecord, Tier
from kvstore.transfer import TransferOrder

SIZE = 100
A, B, C, D = (identity_of(i) for i in (1, 2, 3, 4))


def on_disk(*chunks):
    return [ChunkRecord(chunk.key, SIZE, len(chunk.token_ids), frozenset({Tier.DISK})) for chunk in chunks]


def on_host(*chunks):
    return [ChunkRecord(chunk.key, SIZE, len(chunk.token_ids), frozenset({Tier.DISK, Tier.HOST})) for chunk in chunks]


def everywhere(*chunks):
    return [ChunkRecord(chunk.key, SIZE, len(chunk.token_ids), frozenset(Tier)) for chunk in chunks]


def scheduler_of(host, records=(), gpu=0, costs=None):
    """A scheduler that evicts the least recently used, so that a test can say which chunk goes."""
    return ChunkScheduler({Tier.HOST: host, Tier.GPU: gpu}, records, LruPolicy, costs)


def to_host(*chunks):
    return tuple(TransferOrder(chunk, Tier.HOST) for chunk in chunks)


def to_gpu(*chunks):
    return tuple(TransferOrder(chunk, Tier.GPU) for chunk in chunks)


def published(chunk, tier=Tier.HOST, nbytes=SIZE):
    return Published(chunk.key, tier, nbytes, len(chunk.token_ids))


def evicted(chunk, tier=Tier.HOST):
    return Evicted(chunk.key, tier, SIZE)


def keys_of(evictions):
    return [eviction.key for eviction in evictions]


def arrive(scheduler, chunks):
    for chunk in chunks:
        scheduler.on_event(published(chunk))


def leave(scheduler, evictions):
    for eviction in evictions:
        scheduler.on_event(Evicted(eviction.key, Tier.HOST, SIZE))


def advice(*chunks):
    return [Advice(chunk, 1.0 / place) for place, chunk in enumerate(chunks, start=1)]
