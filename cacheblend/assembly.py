"""Puts the parts of an engine together over one runner and one store. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.engine import BlendEngine
from cacheblend.protocols import ModelRunner
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.scheduling.delegated_scheduler import DelegatedScheduler, NoAdvice
from cacheblend.scheduling.predictor_process import ProcessPredictor
from kvstore.tiers import Tier
from kvstore.transfer import ThreadPrefetcher

if TYPE_CHECKING:
    from kvstore.store import ChunkStore

RUNNING_AT_A_TIME = 256
"""Requests handed on to a runner that schedules for itself; it queues those that it does not run yet."""


def make_engine(runner: ModelRunner, store: ChunkStore) -> BlendEngine:
    """An engine over a runner.

    One that schedules for itself gets every request as it stands. Any other one gets a chunk scheduler over the store's
    host budget, a predictor in its own process, and loads on threads.

    Args:
        runner: runs the model; it reads and writes `store`, or the folder that `store` looks into.
        store: holds chunk KV; what is in it now is in the scheduler's catalogue.
    """
    if runner.schedules_kv:
        return BlendEngine(
            runner, store, DelegatedScheduler(), NoAdvice(), ThreadPrefetcher(store), max_running=RUNNING_AT_A_TIME
        )
    scheduler = ChunkScheduler({Tier.HOST: store.host_budget_bytes})
    engine = BlendEngine(runner, store, scheduler, ProcessPredictor(), ThreadPrefetcher(store))
    # After the engine follows the store: a chunk that is put in between is then in both, and entered once.
    scheduler.take_over(store.records())
    return engine
