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

from cacheblend.assembly import make_engine
from cacheblend.plan import Policy, Segment, SegmentRole
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.request import EngineRequest, RequestOutcome
from cacheblend.sampling_params import SamplingParams
from eval.fidelity.arms import Arm
from eval.layout import LaidOutPrompt
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore

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
        first_tokens: the tokens that repetitions began with; one, unless they differ.
    """

    name: str
    ttft_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[float]] = field(default_factory=dict)
    recomputed_tokens: int = 0
    recomputed_ratio: float = 0.0
    first_tokens: set[int] = field(default_factory=set)

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
        self.first_tokens.add(outcome.token_ids[0])


class Stand:
    """A runner, a store in memory that holds the prompt's chunks, and an engine over them.

    Args:
        runner: with `store`.
        store: with room for all chunks on the host.
        workload: the prompt that is served.

    Attributes:
        build_seconds: what computing the chunks' KV took.

    Raises:
        BlendError: a chunk does not fit the model's context.
    """

    def __init__(self, runner: ReferenceRunner, store: ChunkStore, workload: LaidOutPrompt) -> None:
        self._runner = runner
        self._workload = workload
        started = time.perf_counter()
        runner.collect(workload.chunks, workload.head)
        self.build_seconds = time.perf_counter() - started
        self._engine = make_engine(runner, store)
        self._served = 0

    def serve(self, arm: Arm) -> RequestOutcome:
        """Serve the prompt once and return what became of it; one token is generated.

        Raises:
            BlendError: the engine refused the prompt.
        """
        self._served += 1
        segment = self._fresh if arm.policy is Policy.FULL else self._reused
        plan = self._workload.plan(segment, arm.selector, arm.carry_drift)
        request = EngineRequest(str(self._served), plan, arm.policy, SamplingParams(max_tokens=1))
        self._engine.submit(request)
        finished: tuple[RequestOutcome, ...] = ()
        while not finished:
            finished = self._engine.step().finished
        if finished[0].error is not None:
            raise finished[0].error
        return finished[0]

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def _reused(self, chunk: tuple[int, ...]) -> Segment:
        return Segment(SegmentRole.CHUNK, chunk, ChunkIdentity(self._runner.fingerprint, self._workload.head, chunk))

    def _fresh(self, chunk: tuple[int, ...]) -> Segment:
        return Segment(SegmentRole.CHUNK, chunk)


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


@dataclass(frozen=True)
class SpeedRun:
    """What was measured.

    Attributes:
        arms: times by arm; full prefill's come first.
        stock_ms: full prefill by transformers alone, milliseconds, one a repetition.
        share: the CPU that the timed servings had.
        prompt_tokens: rows of the prompt.
        chunks: chunks in it.
        kv_bytes_per_token: bytes of KV one token takes.
        build_seconds: what computing the chunks' KV took.
        fingerprint: the model's.
    """

    arms: list[ArmTimes]
    stock_ms: list[float]
    share: CpuShare
    prompt_tokens: int
    chunks: int
    kv_bytes_per_token: int
    build_seconds: float
    fingerprint: str


def measure(
    serve: Callable[[Arm], RequestOutcome],
    stock_prefill: Callable[[], float],
    arms: Sequence[Arm],
    repetitions: int,
    seed: int,
    on_served: Callable[[], None],
) -> tuple[list[ArmTimes], list[float], CpuShare]:
    """Serve every arm `repetitions` times, each time all of them in random order, after one warm-up each.

    Args:
        serve: serves the prompt once.
        stock_prefill: prefills the same prompt with transformers alone and returns its milliseconds; takes turns too.
        arms: what is compared.
        repetitions: timed servings of each arm.
        seed: of the order.
        on_served: called after each serving, warm-ups included.

    Returns:
        Times by arm, the stock prefill's times, and the share of CPU that the timed servings had.
    """
    order = random.Random(seed)
    times = {arm.name: ArmTimes(arm.name) for arm in arms}
    stock: list[float] = []
    share = CpuShare()
    for arm in arms:
        serve(arm)
        on_served()
    stock_prefill()
    on_served()
    for _ in range(repetitions):
        turns = [*arms, None]
        order.shuffle(turns)
        for turn in turns:
            with share.timed():
                if turn is None:
                    stock.append(stock_prefill())
                else:
                    times[turn.name].note(serve(turn))
            on_served()
    return list(times.values()), stock, share
