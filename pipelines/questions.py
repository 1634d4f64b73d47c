"""From a question to a plan: what is retrieved, how it is laid out, and what is asked to be reused."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cacheblend.fidelity import Fidelity
from cacheblend.plan import BlendPlan, Policy, Segment, SegmentRole, require_fits
from cacheblend.protocols import PrefillHints
from cacheblend.request import EngineRequest
from cacheblend.sampling_params import SamplingParams
from kvstore.key import ChunkIdentity
from kvstore.stored_chunks import StoredChunks
from pipelines.answer import Source
from pipelines.config import PipelineConfig
from pipelines.corpus import Corpus
from pipelines.errors import PipelineError
from pipelines.primer import ChunkPrefixes
from pipelines.prompt import PromptTemplate
from retrieval.chunk import Chunk
from retrieval.documents import Document
from retrieval.text import clean_text


@dataclass(frozen=True)
class Prepared:
    """A question ready to be submitted, and what its answer will need."""

    question: str
    request: EngineRequest
    sources: tuple[Source, ...]
    retrieval_ms: float


@dataclass(frozen=True)
class QuestionPlanner:
    """Lays questions out for one model and one corpus.

    Attributes:
        config: what a call does not say.
        template: of the model.
        prefixes: what the corpus's chunks are encoded behind.
        corpus: where documents are retrieved.
        fingerprint: of the model.
        max_model_len: rows of prompt and answer together.
        stored: which chunks there are; None where the engine finds that out itself and every chunk is asked for.
    """

    config: PipelineConfig
    template: PromptTemplate
    prefixes: ChunkPrefixes
    corpus: Corpus
    fingerprint: str
    max_model_len: int
    stored: StoredChunks | None

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
        """See `RagPipeline.prepare`."""
        # Arguments and input that are not UTF-8 come with lone surrogates, which tokenizers do not take.
        question = clean_text(question)
        chosen = self._policy(policy)
        blender = self.config.make_selector(selector, ratio, head_tokens, fidelity)
        question_ids = self.template.question_ids(question)
        sampling = sampling or SamplingParams(max_tokens=self.config.max_tokens)
        sampling = replace(sampling, stop=tuple(map(clean_text, sampling.stop)))
        require_fits(len(self.template.head_ids) + len(question_ids), sampling.max_tokens, self.max_model_len)
        started = time.perf_counter()
        found, beyond = self._choose_chunks(question, self.config.top_k if top_k is None else top_k, documents)
        retrieval_ms = (time.perf_counter() - started) * 1e3
        segments = [self._segment(chunk, chosen) for chunk, _ in found]
        if self.template.head_ids:
            segments.insert(0, Segment(SegmentRole.SYSTEM, self.template.head_ids))
        drift = self.config.carry_drift if carry_drift is None else carry_drift
        plan = BlendPlan((*segments, Segment(SegmentRole.QUESTION, question_ids)), blender, drift)
        require_fits(plan.length, sampling.max_tokens, self.max_model_len)
        hints = PrefillHints(session, tuple(map(self.identity, beyond)))
        request = EngineRequest(uuid.uuid4().hex, plan, chosen, sampling, hints)
        sources = tuple(Source(c.document_id, c.title, c.body, score) for c, score in found)
        return Prepared(question, request, sources, 0.0 if documents is not None else retrieval_ms)

    def identity(self, chunk: Chunk) -> ChunkIdentity:
        """What a chunk of the corpus is stored as."""
        return ChunkIdentity(self.fingerprint, self.prefixes.behind(chunk.token_ids), chunk.token_ids)

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
            result = self.corpus.retrieve(question, top_k, self.config.candidates)
            return [(hit.chunk, hit.score) for hit in result.hits], [hit.chunk for hit in result.beyond]
        given = [chunk for d in documents_of(documents) for chunk in self.corpus.chunk(d)]
        if not given:
            raise PipelineError("The list of documents is empty; give some or leave it out to retrieve.")
        return [(chunk, None) for chunk in given], []

    def _segment(self, chunk: Chunk, policy: Policy) -> Segment:
        """The chunk as it will be used: stored KV where there is some, fresh rows and the reason elsewhere."""
        if policy is Policy.FULL:
            return Segment(SegmentRole.CHUNK, chunk.token_ids)
        if self.stored is None:
            return Segment(SegmentRole.CHUNK, chunk.token_ids, self.identity(chunk))
        prefixes = self.prefixes.candidates(chunk.token_ids, self.template.bos_ids())
        identity, reason = self.stored.find(self.fingerprint, chunk.token_ids, prefixes)
        return Segment(SegmentRole.CHUNK, chunk.token_ids, identity, reason.value if reason is not None else None)


def documents_of(given: Iterable[Any]) -> Iterator[Document]:
    """Documents of whatever shape as ours.

    Raises:
        PipelineError: for a single string or mapping, whose items would be taken for documents.
    """
    if isinstance(given, str | bytes | Mapping):
        raise PipelineError(f"The documents are a single {type(given).__name__}; give a list of documents.")
    return map(Document.from_any, given)
