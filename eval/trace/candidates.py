"""What our own retriever would have ranked after a turn's documents: the recording has no candidates."""

from __future__ import annotations

from dataclasses import replace

from eval.trace.recording import Recording, Turn
from retrieval.chunk import Chunk
from retrieval.documents import Document
from retrieval.index import CorpusIndex
from retrieval.protocols import Embedder
from retrieval.retriever import Retriever

RANKED = 20


def with_candidates(recording: Recording, embedder: Embedder) -> Recording:
    """Return the recording with candidates: of the best 20 documents for a turn's question, those not in its prompt.

    All documents of the recording, later ones too, are in the index, as a corpus is before questions come.

    Raises:
        RetrievalError: the recording has no texts.
    """
    index = CorpusIndex(embedder)
    index.add(Chunk.whole(Document(document, text)) for document, text in recording.texts.items() if text.strip())
    retriever = Retriever(index)
    sessions = tuple(
        replace(session, turns=tuple(_ranked(turn, retriever) for turn in session.turns))
        for session in recording.sessions
    )
    return replace(recording, sessions=sessions)


def _ranked(turn: Turn, retriever: Retriever) -> Turn:
    if not turn.question:
        return turn
    hits = retriever.retrieve(turn.question, RANKED).hits
    found = [hit.chunk.document_id for hit in hits]
    return replace(turn, candidates=tuple(document for document in found if document not in turn.documents))
