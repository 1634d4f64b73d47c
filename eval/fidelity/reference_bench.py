"""The bench over the reference runner."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

import torch

from cacheblend.assembly import make_engine
from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.request import EngineRequest, RequestOutcome
from cacheblend.sampling_params import SamplingParams
from eval.errors import EvalError
from eval.fidelity.arms import TIER_NAMES, Arm, Row
from eval.fidelity.bench import WARM_UP, FidelityBench, LaidOutQuestion, TimedAnswer
from eval.fidelity.priming import Priming
from kvstore.errors import ChunkUnavailable
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore
from kvstore.tiers import Tier
from pipelines.config import PipelineConfig
from pipelines.models import resolve_model
from pipelines.precompute import PrecomputeSummary, precompute_chunks
from pipelines.runners import REFERENCE


class ReferenceBench(FidelityBench):
    """Runs one request after the other.

    Args:
        config: as for `FidelityBench`, and the device.
        priming: as for `FidelityBench`.

    Raises:
        EvalError, PipelineError, BlendError, ModelError, StoreError: one sentence on what cannot be used.
    """

    engine_name = REFERENCE
    is_gated_elsewhere = True

    def __init__(self, config: PipelineConfig, priming: Priming | None = None) -> None:
        folder = resolve_model(config.model)
        super().__init__(config, folder, priming)
        self._store = ChunkStore(config.cache_dir, config.host_budget_bytes)
        self._runner: ReferenceRunner = ReferenceRunner.from_folder(folder, self._store, config.dtype, config.device)
        self._engine = make_engine(self._runner, self._store)

    @property
    def device(self) -> str:
        """See `FidelityBench.device`."""
        return self.config.device

    def build(self, question: LaidOutQuestion) -> PrecomputeSummary:
        """See `FidelityBench.build`."""
        return precompute_chunks(self._identities(question), self._store, self._collect, self.kv_bytes_per_token)

    def warm_up(self, question: LaidOutQuestion) -> None:
        """See `FidelityBench.warm_up`."""
        for _ in self.answers(question, WARM_UP[1:]):
            pass

    def answers(self, question: LaidOutQuestion, rows: Sequence[Row]) -> Iterator[tuple[Row, TimedAnswer]]:
        """See `FidelityBench.answers`."""
        for row in rows:
            if row.arm.selector is not None:
                self.place(question, row.tier)
            yield row, self.answer(question, row.arm)

    def scores(
        self, question: LaidOutQuestion, arms: Sequence[Arm], answer: Sequence[int]
    ) -> Iterator[tuple[Arm, torch.Tensor]]:
        """See `FidelityBench.scores`."""
        for arm in arms:
            if arm.selector is not None:
                self.place(question, "warm")
            yield arm, self.score(question, arm, answer)

    def place(self, question: LaidOutQuestion, tier: str) -> None:
        """Bring the question's chunks to host memory (`warm`), or leave them on disk only (`cold`).

        Raises:
            EvalError: they do not fit host memory's budget, or there is no disk to be cold on.
        """
        if TIER_NAMES[tier] is Tier.DISK and self._store.disk is None:
            raise EvalError("Cold chunks need a folder to be loaded from; give --cache-dir or leave out the tier cold.")
        for identity in self._identities(question):
            if TIER_NAMES[tier] is Tier.DISK:
                self._store.evict(identity.key, Tier.HOST)
            elif self._store.lookup(identity) is not Tier.HOST:
                self._load(question, identity)

    def forget(self, question: LaidOutQuestion) -> None:
        """Free host memory of the question's chunks; without a cache folder their KV is gone."""
        for identity in self._identities(question):
            self._store.evict(identity.key, Tier.HOST)

    def answer(self, question: LaidOutQuestion, arm: Arm) -> TimedAnswer:
        """Answer greedily, with the chunks where they are.

        Raises:
            BlendError: the engine refused the prompt.
        """
        sampling = SamplingParams(max_tokens=self.config.max_tokens)
        request = EngineRequest(uuid.uuid4().hex, self._plan(question, arm), arm.policy, sampling)
        cpu, wall = time.process_time(), time.perf_counter()
        self._engine.submit(request)
        finished: tuple[RequestOutcome, ...] = ()
        while not finished:
            finished = self._engine.step().finished
        timed = TimedAnswer(finished[0], time.process_time() - cpu, time.perf_counter() - wall)
        if timed.outcome.error is not None:
            raise timed.outcome.error
        return timed

    def score(self, question: LaidOutQuestion, arm: Arm, answer: Sequence[int]) -> torch.Tensor:
        """One arm of `scores`, with the chunks where they are."""
        log_probabilities, _ = self._runner.score(self._plan(question, arm), answer[:-1])
        return log_probabilities

    def close(self) -> None:
        """See `FidelityBench.close`."""
        self._engine.close()
        self._store.close()

    def _load(self, question: LaidOutQuestion, identity: ChunkIdentity) -> None:
        try:
            self._store.load(identity)
        except ChunkUnavailable as error:
            gib = sum(map(len, question.chunks)) * self.kv_bytes_per_token / (1 << 30)
            raise EvalError(
                f"The chunks of question {question.example.id} ({gib:.2f} GiB) cannot all be held in host memory "
                f"({error.reason}); give --host-gib more than {self.config.host_budget_bytes / (1 << 30):.2f}."
            ) from error

    def _plan(self, question: LaidOutQuestion, arm: Arm) -> BlendPlan:
        return question.plan(lambda chunk: self._segment(chunk, arm), arm.selector, arm.carry_drift)

    def _segment(self, chunk: tuple[int, ...], arm: Arm) -> Segment:
        if arm.selector is None:
            return Segment(SegmentRole.CHUNK, chunk)
        identity, reason = self._store.find(self.fingerprint, chunk, [self.prefixes.behind(chunk)])
        return Segment(SegmentRole.CHUNK, chunk, identity, None if reason is None else reason.value)
