"""A corpus: documents, their chunks, and the index over them, made when it is first searched."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from pipelines.models import resolve_embedder
from retrieval.chunk import Chunk
from retrieval.chunking import TokenChunker
from retrieval.documents import Document
from retrieval.errors import RetrievalError
from retrieval.index import CorpusIndex
from retrieval.protocols import Embedder
from retrieval.retriever import RetrievalResult, Retriever

logger = logging.getLogger(__name__)


class Corpus:
    """The documents a pipeline answers from.

    Args:
        chunker: cuts documents into chunks of token ids.
        load_embedder: makes the embedder, called once, when the corpus is first searched.
        index_dir: folder that keeps indexes between runs, one folder a corpus; None keeps none.
    """

    def __init__(
        self, chunker: TokenChunker, load_embedder: Callable[[], Embedder], index_dir: Path | None = None
    ) -> None:
        self._chunker = chunker
        self._load_embedder = load_embedder
        self._index_dir = index_dir
        self._chunks: dict[str, list[Chunk]] = {}
        self._retriever: Retriever | None = None
        # Embedders are not thread-safe, and an index must not be searched while it changes.
        self._lock = threading.Lock()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks in the order of their documents."""
        # A copy at once: another thread may be adding documents.
        return tuple(chunk for chunks in list(self._chunks.values()) for chunk in chunks)

    @property
    def retrieval_calls(self) -> int:
        """How often the retriever was asked."""
        return self._retriever.calls if self._retriever is not None else 0

    def chunk(self, document: Document) -> list[Chunk]:
        """Cut a document that need not belong to the corpus."""
        return self._chunker.chunk(document)

    def add(self, documents: Iterable[Document]) -> list[Chunk]:
        """Add documents and return their chunks; one that is there already is passed over.

        Raises:
            RetrievalError: if a document has no text, or its id is there with another text; nothing is added then.
        """
        with self._lock:
            fresh: dict[str, list[Chunk]] = {}
            for document in documents:
                chunks = self._chunker.chunk(document)
                known = self._chunks.get(document.id) or fresh.setdefault(document.id, chunks)
                if [chunk.id for chunk in known] != [chunk.id for chunk in chunks]:
                    raise RetrievalError(
                        f"Document id '{document.id}' is used for two different texts; give each document its own id."
                    )
            added = [chunk for chunks in fresh.values() for chunk in chunks]
            if self._retriever is not None and added:
                self._retriever.index.add(added)
            self._chunks.update(fresh)
        return added

    def delete(self, document_ids: Iterable[str]) -> None:
        """Delete documents; an index that exists is changed, not built again.

        Raises:
            RetrievalError: for an unknown document.
        """
        names = list(dict.fromkeys(document_ids))
        with self._lock:
            for name in names:
                if name not in self._chunks:
                    raise RetrievalError(f"Document id '{name}' is not in the corpus; nothing was deleted.")
            for name in names:
                del self._chunks[name]
            if self._retriever is not None:
                self._retriever.index.delete(names)

    def retrieve(self, question: str, k: int, candidates: int) -> RetrievalResult:
        """The best `k` chunks for a question, and the next `candidates`.

        Raises:
            RetrievalError: if the question or the corpus is empty.
        """
        with self._lock:
            if self._retriever is None:
                self._retriever = Retriever(self._open_index())
            return self._retriever.retrieve(question, k, candidates)

    def _open_index(self) -> CorpusIndex:
        """The saved index of exactly these chunks and this embedder, or a new one."""
        embedder = self._load_embedder()
        chunks = self.chunks
        if self._index_dir is None or not chunks:
            return _build(chunks, embedder)
        digest = hashlib.sha256(f"{embedder.fingerprint}\n{chunks[0].tokenizer}\n".encode())
        for chunk in chunks:
            digest.update(f"{chunk.document_id} {chunk.id} {chunk.token_ids}\n".encode())
        folder = self._index_dir / digest.hexdigest()[:32]
        if folder.exists():
            try:
                return CorpusIndex.load(folder, embedder, chunks[0].tokenizer)
            except RetrievalError as error:
                logger.warning("the saved index is built anew: %s", error)
        index = _build(chunks, embedder)
        try:
            index.save(folder)
        except RetrievalError as error:
            logger.warning("the index is not kept: %s", error)
        return index


def _build(chunks: Iterable[Chunk], embedder: Embedder) -> CorpusIndex:
    index = CorpusIndex(embedder)
    index.add(chunks)
    return index


def load_embedder(name: str) -> Embedder:
    """The embedder of a setting: `bundled:NAME`, a folder or a hub id.

    Raises:
        ModelError: if it cannot be had.
    """
    # Imported here because it takes seconds, and precomputing never needs it.
    from retrieval.embedding import SentenceEmbedder

    return SentenceEmbedder(resolve_embedder(name))
