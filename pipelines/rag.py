"""`RagPipeline`: documents in, answers with sources and an honest account out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cacheblend.assembly import make_engine
from cacheblend.plan import BlendPlan, Policy, Segment, SegmentRole, require_fits
from cacheblend.request import EngineRequest, RequestOutcome
from cacheblend.sampling_params import SamplingParams
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore
from pipelines.answer import Answer, AnswerMeta, Source
from pipelines.config import PipelineConfig, make_config
from pipelines.corpus import Corpus
from pipelines.detokenizer import Detokenizer
from pipelines.engine_loop import EngineLoop
from pipelines.errors import PipelineError
from pipelines.models import resolve_embedder, resolve_model
from pipelines.precompute import PrecomputeProgress, PrecomputeSummary, precompute_chunks
from pipelines.prompt import PromptTemplate
from pipelines.runners import choose_engine, make_runner
from kvstore.stored_chunks import StoredChunks
from pipelines.streaming import AnswerStream, AsyncAnswerStream
from pipelines.tokenizer import require_tokenizer
from retrieval.chunk import Chunk
from retrieval.chunking import TokenChunker
from retrieval.documents import Document
from retrieval.text import clean_text

if TYPE_CHECKING:
    from retrieval.embedding import SentenceEmbedder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A question ready to be submitted, and what its answer will need."""

    question: str
    request: EngineRequest
    sources: tuple[Source, ...]
    retrieval_ms: float


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
        self.engine = choose_engine(config.engine)
        folder = resolve_model(config.model)
        self._tokenizer = require_tokenizer(folder)
        self.store = ChunkStore(config.cache_dir, config.host_budget_bytes)
        self._stored = StoredChunks(self.store)
        self.runner = make_runner(self.engine, folder, self.store, config.dtype, config.device)
        self._template = PromptTemplate(self._tokenizer, config.system_prompt)
        self._prefix = self._template.prefix_ids(config.prefix)
        chunker = TokenChunker(self._tokenizer, size=config.chunk_tokens, overlap=config.chunk_overlap)
        self._corpus = Corpus(chunker, self._load_embedder, config.index_dir)
        self._corpus.add(_documents(documents))
        self._loop = EngineLoop(make_engine(self.runner, self.store))

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
    def retrieval_calls(self) -> int:
        """How often the retriever was asked; precomputing never does."""
        return self._corpus.retrieval_calls

    def add_documents(self, documents: Iterable[Any]) -> None:
        """Add documents to the corpus; their KV is computed by the next `precompute`.

        Raises:
            RetrievalError: if one has no text, or its id is there with another text; none is added then.
        """
        self._corpus.add(_documents(documents))

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
        self.store.refresh()
        return precompute_chunks(
            [self._identity(chunk) for chunk in self.chunks],
            self.store,
            self._collect,
            self.runner.kv_bytes_per_token,
            on_progress,
            dry_run,
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
        head_tokens: int | None = None,
        top_k: int | None = None,
        documents: Iterable[Any] | None = None,
        sampling: SamplingParams | None = None,
    ) -> Prepared:
        """Lay a question out as a plan, without running it.

        Args:
            question: the question.
            policy: `full`, `blend` or `auto`.
            selector: which reusable rows are recomputed; `none` is plain reuse.
            ratio: share of reusable rows to recompute, 0 to 1.
            head_tokens: rows per chunk for `chunk_head`.
            top_k: chunks to retrieve.
            documents: answer from these, in this order, instead of retrieving.
            sampling: how tokens are drawn; greedy by default.

        Raises:
            PipelineError: for an empty question, an unknown policy, or documents that are none or not a list.
            BlendError: for an unknown selector, a ratio out of range, or a prompt that does not fit the context.
            RetrievalError: if the corpus is empty, a document has no text, or `top_k` is below 1.
        """
        # Arguments and input that are not UTF-8 come with lone surrogates, which tokenizers do not take.
        question = clean_text(question)
        chosen = self._policy(policy)
        blender = self.config.make_selector(selector, ratio, head_tokens)
        question_ids = self._template.question_ids(question)
        sampling = sampling or SamplingParams(max_tokens=self.config.max_tokens)
        sampling = replace(sampling, stop=tuple(map(clean_text, sampling.stop)))
        require_fits(len(self._template.head_ids) + len(question_ids), sampling.max_tokens, self.runner.max_model_len)
        started = time.perf_counter()
        found, beyond = self._choose_chunks(question, self.config.top_k if top_k is None else top_k, documents)
        retrieval_ms = (time.perf_counter() - started) * 1e3
        segments = [self._segment(chunk, chosen) for chunk, _ in found]
        if self._template.head_ids:
            segments.insert(0, Segment(SegmentRole.SYSTEM, self._template.head_ids))
        plan = BlendPlan((*segments, Segment(SegmentRole.QUESTION, question_ids)), blender)
        require_fits(plan.length, sampling.max_tokens, self.runner.max_model_len)
        request = EngineRequest(uuid.uuid4().hex, plan, chosen, sampling, tuple(map(self._identity, beyond)))
        sources = tuple(Source(c.document_id, c.title, c.body, score) for c, score in found)
        return Prepared(question, request, sources, 0.0 if documents is not None else retrieval_ms)

    def close(self) -> None:
        """End what is running and give memory back. Closing again does nothing."""
        self._loop.close()
        self.store.close()

    def __enter__(self) -> RagPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load_embedder(self) -> SentenceEmbedder:
        # Imported here because it takes seconds, and precomputing never needs it.
        from retrieval.embedding import SentenceEmbedder

        return SentenceEmbedder(resolve_embedder(self.config.embedder))

    def _identity(self, chunk: Chunk) -> ChunkIdentity:
        return ChunkIdentity(self.runner.fingerprint, self._prefix, chunk.token_ids)

    def _collect(self, identities: Sequence[ChunkIdentity]) -> None:
        chunks = [identity.token_ids for identity in identities]
        self._loop.call(lambda: self.runner.collect(chunks, self._prefix))

    def _policy(self, policy: Policy | str | None) -> Policy:
        if policy is None:
            return self.config.policy
        try:
            return Policy(policy)
        except ValueError:
            known = ", ".join(Policy)
            raise PipelineError(f"Policy '{policy}' is unknown; use one of {known}.") from None

    def _choose_chunks(
        self, question: str, top_k: int, documents: Iterable[Any] | None
    ) -> tuple[list[tuple[Chunk, float | None]], list[Chunk]]:
        if documents is None:
            result = self._corpus.retrieve(question, top_k, self.config.candidates)
            return [(hit.chunk, hit.score) for hit in result.hits], [hit.chunk for hit in result.beyond]
        given = [chunk for d in _documents(documents) for chunk in self._corpus.chunk(d)]
        if not given:
            raise PipelineError("The list of documents is empty; give some or leave it out to retrieve.")
        return [(chunk, None) for chunk in given], []

    def _segment(self, chunk: Chunk, policy: Policy) -> Segment:
        """The chunk as it will be used: stored KV where there is some, fresh rows and the reason elsewhere."""
        if policy is Policy.FULL:
            return Segment(SegmentRole.CHUNK, chunk.token_ids)
        prefixes = {self._prefix: None}
        if bos := self._template.bos_ids():
            prefixes[bos] = None
        identity, reason = self._stored.find(self.runner.fingerprint, chunk.token_ids, list(prefixes))
        return Segment(SegmentRole.CHUNK, chunk.token_ids, identity, reason.value if reason is not None else None)

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
        missed = [s.token_ids for s in prepared.request.plan.segments if s.reason is not None]
        if self.config.collect_missed and missed:
            outcome.add_done_callback(lambda _: self._collect_later(missed))
        return outcome

    def _collect_later(self, missed: Sequence[tuple[int, ...]]) -> None:
        def collect() -> None:
            try:
                self.runner.collect(missed, self._prefix)
            except Exception:
                # Nobody waits for it, and no question may fail because of it.
                logger.exception("%d chunks that a question missed could not be collected", len(missed))

        with contextlib.suppress(PipelineError):
            self._loop.post(collect)

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


def _documents(given: Iterable[Any]) -> Iterator[Document]:
    """Documents of whatever shape as ours.

    Raises:
        PipelineError: for a single string or mapping, whose items would be taken for documents.
    """
    if isinstance(given, str | bytes | Mapping):
        raise PipelineError(f"The documents are a single {type(given).__name__}; give a list of documents.")
    return map(Document.from_any, given)
