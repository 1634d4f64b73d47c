"""Runs arms interleaved over one engine and keeps every time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from cacheblend.engine import BlendEngine
from cacheblend.plan import Policy
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.request import EngineRequest, RequestOutcome
from cacheblend.sampling_params import SamplingParams
from cacheblend.scheduling.lookahead_predictor import LookAheadPredictor
from cacheblend.scheduling.lru_scheduler import LruScheduler
from eval.fidelity.arms import Arm
from eval.speed.workload import Workload
from kvstore.store import ChunkStore
from kvstore.transfer import ThreadPrefetcher

IDLE_SHARE = 0.85
"""CPU time over wall time and threads below which another program was in the way."""


@dataclass
class ArmTimes:
    """What one arm took.

    Attributes:
        name: the arm.
        ttft_ms: submission to first token through scheduler, prefetcher and runner, one a repetition.
        parts_ms: by part, one a repetition.
        recomputed_tokens: reusable rows recomputed.
        recomputed_ratio: the same as a share of reusable rows, averaged over layers.
        first_token: the token every repetition gave.
    """

    name: str
    ttft_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[float]] = field(default_factory=dict)
    recomputed_tokens: int = 0
    recomputed_ratio: float = 0.0
    first_token: int | None = None

    @property
    def median_ms(self) -> float:
        """Median TTFT in milliseconds."""
        return median(self.ttft_ms)

    def note(self, outcome: RequestOutcome) -> None:
        """Add one repetition."""
        assert outcome.ttft_ms is not None
        self.ttft_ms.append(outcome.ttft_ms)
        for part, milliseconds in outcome.report.parts_ms.items():
            self.parts_ms.setdefault(part, []).append(milliseconds)
        self.recomputed_tokens = outcome.report.recomputed_tokens
        self.recomputed_ratio = outcome.report.recomputed_ratio
        self.first_token = outcome.token_ids[0]


class Stand:
    """A runner, a store in memory that holds the workload's chunks, and an engine over them.

    Args:
        runner: with `store`.
        store: with room for all chunks on the host.
        workload: what is served.
    """

    def __init__(self, runner: ReferenceRunner, store: ChunkStore, workload: Workload) -> None:
        self._runner = runner
        self._workload = workload
        started = time.perf_counter()
        runner.collect(workload.chunks, workload.head)
        self.build_seconds = time.perf_counter() - started
        scheduler = LruScheduler(store.host_budget_bytes, store.records())
        self._engine = BlendEngine(runner, store, scheduler, LookAheadPredictor(), ThreadPrefetcher(store))
        self._served = 0

    def serve(self, arm: Arm) -> RequestOutcome:
        """Serve the prompt once and return what became of it; one token is generated."""
        self._served += 1
        plan = self._workload.plan(self._runner.fingerprint, arm.selector, arm.policy is not Policy.FULL)
        request = EngineRequest(str(self._served), plan, arm.policy, SamplingParams(max_tokens=1))
        self._engine.submit(request)
        while True:
            finished = self._engine.step().finished
            if finished:
                return finished[0]

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


class CpuShare:
    """How much of the timed wall time this process had its threads' processors."""

    def __init__(self) -> None:
        self._cpu = self._wall = 0.0

    @contextmanager
    def timed(self) -> Any:
        """Count the block."""
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            self._cpu += time.process_time() - cpu
            self._wall += time.perf_counter() - wall

    @property
    def over_wall(self) -> float:
        """CPU time over wall time; the number of threads on an idle machine."""
        return self._cpu / self._wall if self._wall else 0.0

    @property
    def void(self) -> bool:
        """Whether the times say nothing because the processors were not free."""
        return self.over_wall < IDLE_SHARE * torch.get_num_threads()


def measure(
    stand: Stand,
    arms: Sequence[Arm],
    repetitions: int,
    seed: int,
    on_served: Callable[[], None],
    stock_prefill: Callable[[], float] | None = None,
) -> tuple[list[ArmTimes], list[float], CpuShare]:
    """Serve every arm `repetitions` times in random order after one warm-up each.

    Args:
        stand: what serves.
        arms: what is compared.
        repetitions: timed servings of each arm.
        seed: of the order.
        on_served: called after each serving, warm-ups included.
        stock_prefill: prefills the same prompt with transformers alone and returns its milliseconds.

    Returns:
        Times by arm, the stock prefill's times, and the share of CPU the timed part had.
    """
    order = random.Random(seed)
    times = {arm.name: ArmTimes(arm.name) for arm in arms}
    stock: list[float] = []
    share = CpuShare()
    for repetition in range(repetitions + 1):
        turns: list[Arm | None] = [*arms, *([None] if stock_prefill is not None else [])]
        order.shuffle(turns)
        for arm in turns:
            with share.timed():
                outcome = stand.serve(arm) if arm is not None else None
                milliseconds = stock_prefill() if arm is None and stock_prefill is not None else 0.0
            on_served()
            if repetition and outcome is not None and arm is not None:
                times[arm.name].note(outcome)
            elif repetition:
                stock.append(milliseconds)
    return list(times.values()), stock, share
