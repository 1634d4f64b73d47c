"""One model over one store, asked the same question in several ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cacheblend.protocols import ModelRunner
from cacheblend.request import RequestOutcome
from eval.fidelity.arms import Arm, Row, parse_arms
from eval.fidelity.priming import Priming, choose_prefixes
from eval.layout import LaidOutPrompt
from inputs import Context, Example
from kvstore.key import ChunkIdentity
from pipelines.config import PipelineConfig
from pipelines.precompute import PrecomputeSummary
from pipelines.prompt import PromptTemplate
from pipelines.tokenizer import require_tokenizer
from retrieval.chunking import TokenChunker
from retrieval.documents import Document

WARM_UP = tuple(Row(arm, "warm") for arm in parse_arms("full,chunk_head:16"))


@dataclass(frozen=True)
class LaidOutQuestion(LaidOutPrompt):
    """A question of the data as token ids: its chunks are those of its own contexts, in their order."""

    example: Example


@dataclass(frozen=True)
class TimedAnswer:
    """An answer's outcome, and the seconds of CPU and of wall time that this process spent on it alone.

    Both are 0 where the model runs in other processes.
    """

    outcome: RequestOutcome
    cpu_s: float = 0.0
    wall_s: float = 0.0


class FidelityBench(ABC):
    """Answers laid-out questions through an engine, without retrieval.

    Prompts are laid out as `RagPipeline` does for documents given with a call. The caller's thread drives the
    engine.

    Args:
        config: model, dtype, cache folder, prefix, chunk size and new tokens are used.
        folder: the model's.
        priming: encode chunks behind the prefix and a primer of this; None for the prefix alone.

    Raises:
        EvalError, PipelineError: one sentence on what cannot be used.
    """

    engine_name: str
    is_gated_elsewhere: bool
    """Whether this engine, on this device, is the one that the project's gates run on."""
    _runner: ModelRunner

    def __init__(self, config: PipelineConfig, folder: Path, priming: Priming | None = None) -> None:
        self.config = config
        self.tokenizer = require_tokenizer(folder)
        self._template = PromptTemplate(self.tokenizer, config.system_prompt)
        self._chunker = TokenChunker(self.tokenizer, config.chunk_tokens, config.chunk_overlap)
        self.priming = priming
        corpus = () if priming is None else self._chunks(priming.corpus)
        self.prefixes = choose_prefixes(self._template.prefix_ids(config.prefix), corpus, priming)

    @property
    def fingerprint(self) -> str:
        """What identifies the model, its weights and dtype."""
        return self._runner.fingerprint

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV one token takes."""
        return self._runner.kv_bytes_per_token

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have."""
        return self._runner.max_model_len

    @property
    @abstractmethod
    def device(self) -> str:
        """What the model runs on: `cpu` or `cuda`, with an index or without."""

    @abstractmethod
    def build(self, question: LaidOutQuestion) -> PrecomputeSummary:
        """Compute the KV of the question's chunks, those that the store does not have yet."""

    @abstractmethod
    def warm_up(self, question: LaidOutQuestion) -> None:
        """Answer what is not timed, so that the first timed answer finds everything ready; leaves no trace."""

    @abstractmethod
    def answers(self, question: LaidOutQuestion, rows: Sequence[Row]) -> Iterator[tuple[Row, TimedAnswer]]:
        """Answer greedily, each row as soon as it is there.

        The time to first token counts from submission to the engine.

        Raises:
            BlendError: the engine refused the prompt.
            EvalError: chunks cannot be where a row wants them.
        """

    @abstractmethod
    def scores(
        self, question: LaidOutQuestion, arms: Sequence[Arm], answer: Sequence[int]
    ) -> Iterator[tuple[Arm, torch.Tensor]]:
        """Log-probabilities that predict each token of a forced answer, each arm's as soon as they are there.

        Args:
            question: the prompt.
            arms: how it is prefilled.
            answer: at least one token id.

        Returns:
            [len(answer), vocabulary] float32 for each arm.
        """

    @abstractmethod
    def forget(self, question: LaidOutQuestion) -> None:
        """Free memory of what will not be asked for again, where the engine lets it be freed."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and give memory back."""

    def lay_out(self, example: Example) -> LaidOutQuestion:
        """Turn a question and its own contexts, in their order, into token ids.

        Raises:
            RetrievalError: a context gives no tokens, or chunks are too small for it.
        """
        question = self._template.question_ids(example.question)
        return LaidOutQuestion(self._template.head_ids, self._chunks(example.contexts), question, example)

    def fits(self, question: LaidOutQuestion) -> bool:
        """Whether prompt and answer fit the model's context."""
        return question.length + self.config.max_tokens <= self.max_model_len

    def has_primer_chunk(self, question: LaidOutQuestion) -> bool:
        """Whether the primer consists of a chunk of this question's, among others."""
        return not set(question.chunks).isdisjoint(self.prefixes.primer_chunks)

    def _chunks(self, contexts: Iterable[Context]) -> tuple[tuple[int, ...], ...]:
        documents = (Document("", context.text, context.title) for context in contexts)
        return tuple(chunk.token_ids for document in documents for chunk in self._chunker.chunk(document))

    def _identities(self, question: LaidOutQuestion) -> list[ChunkIdentity]:
        return [self._identity(chunk) for chunk in question.chunks]

    def _identity(self, chunk: tuple[int, ...]) -> ChunkIdentity:
        return ChunkIdentity(self.fingerprint, self.prefixes.behind(chunk), chunk)

    def _collect(self, identities: Sequence[ChunkIdentity]) -> None:
        for prefix, chunks in self.prefixes.groups(identity.token_ids for identity in identities):
            self._runner.collect(chunks, prefix)
