"""Puts the parts of an engine together over one runner and one store. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.engine import BlendEngine
from cacheblend.protocols import ModelRunner
from cacheblend.scheduling.lookahead_predictor import LookAheadPredictor
from cacheblend.scheduling.lru_scheduler import LruScheduler
from kvstore.transfer import ThreadPrefetcher

if TYPE_CHECKING:
    from kvstore.store import ChunkStore


def make_engine(runner: ModelRunner, store: ChunkStore) -> BlendEngine:
    """An engine with an LRU scheduler over the store's host budget, a look-ahead predictor, and loads on threads.

    Args:
        runner: runs the model; it reads and writes `store`.
        store: holds chunk KV; what is in it now is in the scheduler's catalogue.
    """
    scheduler = LruScheduler(store.host_budget_bytes)
    engine = BlendEngine(runner, store, scheduler, LookAheadPredictor(), ThreadPrefetcher(store))
    # After the engine follows the store: a chunk that is put in between is then in both, and entered once.
    scheduler.take_over(store.records())
    return engine
