"""One model over one store, asked the same question in several ways."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend.assembly import make_engine
from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.request import EngineRequest, RequestOutcome
from cacheblend.sampling_params import SamplingParams
from eval.errors import EvalError
from eval.fidelity.arms import TIER_NAMES, Arm
from eval.layout import LaidOutPrompt
from inputs import Example
from kvstore.errors import ChunkUnavailable
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore
from kvstore.tiers import Tier
from pipelines.config import PipelineConfig
from pipelines.models import resolve_model
from pipelines.precompute import PrecomputeSummary, precompute_chunks
from pipelines.prompt import PromptTemplate
from pipelines.tokenizer import require_tokenizer
from retrieval.chunking import TokenChunker
from retrieval.documents import Document


@dataclass(frozen=True)
class LaidOutQuestion(LaidOutPrompt):
    """A question of the data as token ids: its chunks are those of its own contexts, in their order."""

    example: Example


@dataclass(frozen=True)
class TimedAnswer:
    """An answer's outcome, and the seconds of CPU and of wall time that the process spent on it."""

    outcome: RequestOutcome
    cpu_s: float
    wall_s: float


class FidelityBench:
    """Answers laid-out questions through the engine that pipelines use, without retrieval.

    Prompts are laid out as `RagPipeline` does for documents given with a call. The caller's thread drives the
    engine.

    Args:
        config: model, engine, dtype, device, cache folder, prefix, chunk size and new tokens are used.

    Raises:
        EvalError, PipelineError, BlendError, ModelError, StoreError: one sentence on what cannot be used.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self.engine_name = _require_reference(config.engine)
        folder = resolve_model(config.model)
        self.tokenizer = require_tokenizer(folder)
        self._template = PromptTemplate(self.tokenizer, config.system_prompt)
        self._prefix = self._template.prefix_ids(config.prefix)
        self._chunker = TokenChunker(self.tokenizer, config.chunk_tokens, config.chunk_overlap)
        self._store = ChunkStore(config.cache_dir, config.host_budget_bytes)
        self._runner = ReferenceRunner.from_folder(folder, self._store, config.dtype, config.device)
        self._engine = make_engine(self._runner, self._store)

    @property
    def fingerprint(self) -> str:
        """What identifies the model, its weights and dtype."""
        return self._runner.fingerprint

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV one token takes."""
        return self._runner.kv_bytes_per_token

    def lay_out(self, example: Example) -> LaidOutQuestion:
        """Turn a question and its own contexts, in their order, into token ids.

        Raises:
            RetrievalError: a context gives no tokens, or chunks are too small for it.
        """
        documents = [Document("", context.text, context.title) for context in example.contexts]
        chunks = tuple(chunk.token_ids for document in documents for chunk in self._chunker.chunk(document))
        question = self._template.question_ids(example.question)
        return LaidOutQuestion(self._template.head_ids, chunks, question, example)

    def fits(self, question: LaidOutQuestion) -> bool:
        """Whether prompt and answer fit the model's context."""
        return question.length + self.config.max_tokens <= self._runner.max_model_len

    def build(self, question: LaidOutQuestion) -> PrecomputeSummary:
        """Compute the KV of the question's chunks, those that the store does not have yet."""
        return precompute_chunks(self._identities(question), self._store, self._collect, self.kv_bytes_per_token)

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
        """Answer greedily; the time to first token counts from submission to the engine.

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
        """Log-probabilities that predict each token of a forced answer.

        Args:
            question: the prompt.
            arm: how it is prefilled.
            answer: at least one token id.

        Returns:
            [len(answer), vocabulary] float32.
        """
        log_probabilities, _ = self._runner.score(self._plan(question, arm), answer[:-1])
        return log_probabilities

    def close(self) -> None:
        """Stop the engine and give memory back."""
        self._engine.close()
        self._store.close()

    def _identities(self, question: LaidOutQuestion) -> list[ChunkIdentity]:
        return [ChunkIdentity(self.fingerprint, self._prefix, chunk) for chunk in question.chunks]

    def _collect(self, identities: Sequence[ChunkIdentity]) -> None:
        self._runner.collect([identity.token_ids for identity in identities], self._prefix)

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
        return question.plan(lambda chunk: self._segment(chunk, arm), arm.selector)

    def _segment(self, chunk: tuple[int, ...], arm: Arm) -> Segment:
        if arm.selector is None:
            return Segment(SegmentRole.CHUNK, chunk)
        identity, reason = self._store.find(self.fingerprint, chunk, [self._prefix])
        return Segment(SegmentRole.CHUNK, chunk, identity, None if reason is None else reason.value)


def _require_reference(engine: str) -> str:
    """The engine that evaluations run on: the one that can score a forced answer.

    Raises:
        EvalError: for another one.
    """
    if engine not in ("auto", "reference"):
        raise EvalError(f"Evaluations run on the engine `reference` so far, not on '{engine}'; use it, or `auto`.")
    return "reference"
