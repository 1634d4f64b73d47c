"""`RagPipeline`: documents in, answers with sources and an honest account out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

from cacheblend.assembly import make_engine
from cacheblend.fidelity import Fidelity
from cacheblend.plan import Policy
from cacheblend.request import RequestOutcome
from cacheblend.sampling_params import SamplingParams
from kvstore.key import ChunkIdentity
from kvstore.stored_chunks import StoredChunks
from pipelines.answer import Answer, AnswerMeta
from pipelines.config import PipelineConfig, make_config
from pipelines.corpus import Corpus, load_embedder
from pipelines.detokenizer import Detokenizer
from pipelines.engine_loop import EngineLoop
from pipelines.errors import PipelineError
from pipelines.missed import MissedChunks
from pipelines.models import resolve_model
from pipelines.precompute import PrecomputeProgress, PrecomputeSummary, precompute_chunks
from pipelines.primer import ChunkPrefixes
from pipelines.primer_source import PrimerSource
from pipelines.prompt import PromptTemplate
from pipelines.questions import Prepared, QuestionPlanner, documents_of
from pipelines.runners import load_engine, require_installed
from pipelines.streaming import AnswerStream, AsyncAnswerStream
from pipelines.tokenizer import require_tokenizer
from retrieval.chunk import Chunk
from retrieval.chunking import TokenChunker


class RagPipeline:
    """Answers questions over a corpus, reusing the KV of its chunks.

    Safe to call from several threads and event loops: questions asked together are served together.

    Example:
        >>> pipeline = RagPipeline.from_documents(["The mill of Harrow burned in 1841."])
        >>> pipeline.precompute()
        >>> answer = pipeline.run("When did the mill burn?")
        >>> answer.text, answer.sources[0].text, answer.meta.reused_tokens

    Args:
        documents: strings, mappings with `text`, our documents, or LangChain- and LlamaIndex-shaped ones.
        config: the settings.

    Raises:
        PipelineError, BlendError, ModelError, RetrievalError, StoreError: one sentence on what cannot be used.
    """

    def __init__(self, documents: Iterable[Any], config: PipelineConfig) -> None:
        self.config = config
        require_installed(config.engine)
        folder = resolve_model(config.model)
        self._tokenizer = require_tokenizer(folder)
        template = PromptTemplate(self._tokenizer, config.system_prompt)
        chunker = TokenChunker(self._tokenizer, size=config.chunk_tokens, overlap=config.chunk_overlap)
        self._corpus = Corpus(chunker, partial(load_embedder, config.embedder), config.index_dir)
        self._corpus.add(documents_of(documents))
        head = template.prefix_ids(config.prefix)
        primer = PrimerSource(config.primer, chunker)
        self._loaded = load_engine(config, folder)
        self.engine, self.runner, self.store = self._loaded.name, self._loaded.runner, self._loaded.store
        with self._closed_on_failure():
            self._primer = primer.choose(self.chunks, len(head), self.runner.max_model_len)
        prefixes = ChunkPrefixes(head, tuple(chunk.token_ids for chunk in self._primer))
        stored = None if self.runner.schedules_kv else StoredChunks(self.store)
        self._planner = QuestionPlanner(
            config, template, prefixes, self._corpus, self.runner.fingerprint, self.runner.max_model_len, stored
        )
        self._loop = EngineLoop(make_engine(self.runner, self.store))
        self._missed = MissedChunks(self.runner, self._loop, prefixes) if config.collect_missed else None

    @classmethod
    def from_documents(cls, documents: Iterable[Any], **settings: Any) -> RagPipeline:
        """Make a pipeline over `documents`; `settings` are those of `PipelineConfig`.

        Raises:
            PipelineError: for an unknown setting or one out of range; others as the class.
        """
        return cls(documents, make_config(**settings))

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The corpus's chunks."""
        return self._corpus.chunks

    @property
    def primer(self) -> tuple[Chunk, ...]:
        """The chunks that the corpus's others are encoded behind, in their order; fixed, and may be none."""
        return self._primer

    @property
    def retrieval_calls(self) -> int:
        """How often the retriever was asked; precomputing never does."""
        return self._corpus.retrieval_calls

    def add_documents(self, documents: Iterable[Any]) -> None:
        """Add documents to the corpus; their KV is computed by the next `precompute`.

        Raises:
            RetrievalError: if one has no text, or its id is there with another text; none is added then.
        """
        self._corpus.add(documents_of(documents))

    def delete_documents(self, document_ids: Iterable[str]) -> None:
        """Delete documents from the corpus; their KV stays in the store until it is pruned.

        Raises:
            RetrievalError: for an unknown id.
        """
        self._corpus.delete(document_ids)

    def precompute(
        self, on_progress: Callable[[PrecomputeProgress], None] | None = None, dry_run: bool = False
    ) -> PrecomputeSummary:
        """Prefill the corpus's chunks that the store, looked at anew, does not have yet.

        Args:
            on_progress: called every few chunks.
            dry_run: only say what would be done.
        """
        self._loaded.shelf.refresh()
        return precompute_chunks(
            [self._planner.identity(chunk) for chunk in self.chunks],
            self._loaded.shelf,
            self._collect,
            self.runner.kv_bytes_per_token,
            on_progress,
            dry_run,
            self._loaded.chunks_per_call,
        )

    async def aprecompute(
        self, on_progress: Callable[[PrecomputeProgress], None] | None = None, dry_run: bool = False
    ) -> PrecomputeSummary:
        """`precompute` for event loops, on a thread, where it also calls `on_progress`.

        Cancelling it ends it after the chunks that are being computed; these are kept.
        """
        cancelled = threading.Event()

        def report(progress: PrecomputeProgress) -> None:
            if cancelled.is_set():
                raise PipelineError("The precomputation was cancelled.")
            if on_progress is not None:
                on_progress(progress)

        try:
            return await asyncio.to_thread(self.precompute, report, dry_run)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def run(self, question: str, **options: Any) -> Answer:
        """Answer a question.

        Args:
            question: the question.
            **options: see `prepare`.

        Raises:
            PipelineError, BlendError, RetrievalError: if it cannot be answered as it stands.
        """
        return self.run_batch([question], **options)[0]

    def run_batch(self, questions: Sequence[str], **options: Any) -> list[Answer]:
        """Answer several questions, served together; the same options hold for all.

        Ctrl-C, or a question that fails, ends all of them.

        Raises:
            PipelineError, BlendError, RetrievalError: if one of them cannot be answered; none is then begun.
        """
        prepared = [self.prepare(question, **options) for question in questions]
        with self._ended_together(prepared):
            outcomes = [self._submit(one) for one in prepared]
            results = [outcome.result() for outcome in outcomes]
        return [self._answer(one, result) for one, result in zip(prepared, results, strict=True)]

    def stream(self, question: str, **options: Any) -> AnswerStream:
        """Answer a question piece by piece: iterate over the text, then take `.answer`.

        Closing the stream early ends the request.
        """
        return self._stream(self.prepare(question, **options))

    async def arun(self, question: str, **options: Any) -> Answer:
        """`run` for event loops; cancelling it ends the request."""
        return (await self.arun_batch([question], **options))[0]

    async def arun_batch(self, questions: Sequence[str], **options: Any) -> list[Answer]:
        """`run_batch` for event loops; cancelling it, or a question that fails, ends the requests."""
        prepared = [await asyncio.to_thread(self.prepare, question, **options) for question in questions]
        with self._ended_together(prepared):
            results = await asyncio.gather(*[asyncio.wrap_future(self._submit(one)) for one in prepared])
        return [self._answer(one, result) for one, result in zip(prepared, results, strict=True)]

    def astream(self, question: str, **options: Any) -> AsyncAnswerStream:
        """`stream` for event loops: `async for` the pieces of the text, then `await stream.answer()`.

        What the question is refused with is raised there.
        """

        async def open_stream() -> AnswerStream:
            # Only the preparation takes time. Cancelled meanwhile, nothing was submitted.
            return self._stream(await asyncio.to_thread(self.prepare, question, **options))

        return AsyncAnswerStream(open_stream)

    def prepare(
        self,
        question: str,
        *,
        policy: Policy | str | None = None,
        selector: str | None = None,
        ratio: float | None = None,
        fidelity: Fidelity | str | None = None,
        head_tokens: int | None = None,
        carry_drift: bool | None = None,
        top_k: int | None = None,
        documents: Iterable[Any] | None = None,
        sampling: SamplingParams | None = None,
        session: str | None = None,
    ) -> Prepared:
        """Lay a question out as a plan, without running it.

        Args:
            question: the question.
            policy: `full`, `blend` or `auto`.
            selector: which reusable rows are recomputed; `none` is plain reuse.
            ratio: share of reusable rows to recompute, 0 to 1.
            fidelity: `fast`, `balanced` or `faithful` instead of a ratio.
            head_tokens: rows per chunk for `chunk_head`.
            carry_drift: move rows that are not recomputed with those that are; the setting's if None.
            top_k: chunks to retrieve.
            documents: answer from these, in this order, instead of retrieving.
            sampling: how tokens are drawn; greedy by default.
            session: name of the conversation the question belongs to: prediction learns from what reappears in it.

        Raises:
            PipelineError: for an empty question, an unknown policy or fidelity, a fidelity beside a ratio, or documents
                that are none or not a list.
            BlendError: for an unknown selector, a ratio out of range, or a prompt that does not fit the context.
            RetrievalError: if the corpus is empty, a document has no text, or `top_k` is below 1.
        """
        return self._planner.prepare(
            question,
            policy=policy,
            selector=selector,
            ratio=ratio,
            fidelity=fidelity,
            head_tokens=head_tokens,
            carry_drift=carry_drift,
            top_k=top_k,
            documents=documents,
            sampling=sampling,
            session=session,
        )

    def close(self) -> None:
        """End what is running, the engine's processes included, and give memory back. Closing again does nothing."""
        self._loop.close()
        self._close_engine()

    def __enter__(self) -> RagPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_engine(self) -> None:
        self.runner.close()
        self.store.close()

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """An engine whose pipeline is not to be must not stay behind."""
        try:
            yield
        except BaseException:
            self._close_engine()
            raise

    def _collect(self, identities: Sequence[ChunkIdentity]) -> None:
        groups = self._planner.prefixes.groups(identity.token_ids for identity in identities)
        self._loop.call(lambda: [self.runner.collect(chunks, prefix) for prefix, chunks in groups])

    def _stream(self, prepared: Prepared) -> AnswerStream:
        stream = AnswerStream(self._detokenizer(prepared), lambda: self._loop.abort(prepared.request.request_id))
        outcome = self._submit(prepared, stream.put)
        stream.attach(outcome, lambda result: self._answer(prepared, result))
        return stream

    @contextlib.contextmanager
    def _ended_together(self, prepared: Sequence[Prepared]) -> Iterator[None]:
        """Whatever ends the wait for these, Ctrl-C and cancelling included, ends their requests: nobody waits."""
        try:
            yield
        except BaseException:
            for one in prepared:
                self._loop.abort(one.request.request_id)
            raise

    def _submit(
        self, prepared: Prepared, on_tokens: Callable[[tuple[int, ...]], None] | None = None
    ) -> Future[RequestOutcome]:
        outcome = self._loop.submit(prepared.request, on_tokens)
        if self._missed is not None:
            self._missed.collect_after(prepared.request.plan, outcome)
        return outcome

    def _detokenizer(self, prepared: Prepared) -> Detokenizer:
        return Detokenizer(self._tokenizer, prepared.request.sampling.stop)

    def _answer(self, prepared: Prepared, outcome: RequestOutcome) -> Answer:
        detokenizer = self._detokenizer(prepared)
        detokenizer.add(outcome.token_ids)
        meta = AnswerMeta.of(
            outcome,
            engine=self.engine,
            policy=prepared.request.policy.value,
            prompt_tokens=prepared.request.plan.length,
            retrieval_ms=prepared.retrieval_ms,
        )
        return Answer(prepared.question, detokenizer.text().strip(), prepared.sources, meta)
