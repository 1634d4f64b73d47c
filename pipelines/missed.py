"""Computes afterwards the chunks that a question missed."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future

from cacheblend.plan import BlendPlan
from cacheblend.protocols import ModelRunner
from cacheblend.request import RequestOutcome
from pipelines.engine_loop import EngineLoop
from pipelines.errors import PipelineError
from pipelines.primer import ChunkPrefixes

logger = logging.getLogger(__name__)


class MissedChunks:
    """Has the KV of missed chunks computed once their question is answered.

    Args:
        runner: computes them, on the loop's thread.
        loop: the engine's.
        prefixes: what chunks are encoded behind.
    """

    def __init__(self, runner: ModelRunner, loop: EngineLoop, prefixes: ChunkPrefixes) -> None:
        self._runner = runner
        self._loop = loop
        self._prefixes = prefixes

    def collect_after(self, plan: BlendPlan, outcome: Future[RequestOutcome]) -> None:
        """Collect what `plan` misses when `outcome` is there."""
        outcome.add_done_callback(lambda done: self._collect_later(self._missed(plan, done)))

    def _missed(self, plan: BlendPlan, done: Future[RequestOutcome]) -> list[tuple[int, ...]]:
        missed = [segment.token_ids for segment in plan.segments if segment.reason is not None]
        if self._runner.schedules_kv and done.exception() is None and done.result().report.fallback_reasons:
            # Such a runner says why, not which; those it has are passed over when they are collected.
            missed += [segment.token_ids for segment in plan.segments if segment.reused]
        return missed

    def _collect_later(self, missed: list[tuple[int, ...]]) -> None:
        if not missed:
            return

        def collect() -> None:
            try:
                for prefix, chunks in self._prefixes.groups(missed):
                    self._runner.collect(chunks, prefix)
            except Exception:
                # Nobody waits for it, and no question may fail because of it.
                logger.exception("%d chunks that a question missed could not be collected", len(missed))

        with contextlib.suppress(PipelineError):
            self._loop.post(collect)
