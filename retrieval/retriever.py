"""The retriever: a question in, ranked chunks out."""

from dataclasses import dataclass

from retrieval.errors import RetrievalError
from retrieval.index import CorpusIndex, Hit


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    """What was found for a question.

    Attributes:
        hits: the best chunks, best first: those to answer from.
        beyond: the next best, best first: candidates for speculative prefetch, never part of the answer.
    """

    hits: tuple[Hit, ...]
    beyond: tuple[Hit, ...]


class Retriever:
    """Finds chunks of one corpus.

    Attributes:
        index: the corpus.
        calls: how often ``retrieve`` was called.
    """

    def __init__(self, index: CorpusIndex) -> None:
        self.index = index
        self.calls = 0

    def retrieve(self, question: str, k: int, candidates: int = 0) -> RetrievalResult:
        """Return the best ``k`` chunks for ``question`` and the next ``candidates``, fewer in a small corpus.

        Raises:
            RetrievalError: the question or the corpus is empty, ``k`` is below 1 or ``candidates`` below 0.
        """
        self.calls += 1
        if k < 1:
            raise RetrievalError(f"{k} chunks cannot be retrieved; give a k of 1 or more.")
        if candidates < 0:
            raise RetrievalError(f"{candidates} candidates cannot be retrieved; give 0 or more.")
        found = self.index.search(question, k + candidates)
        return RetrievalResult(tuple(found[:k]), tuple(found[k:]))
