"""How well retrieval finds what answers a question: gold contexts, answers, and random choice beside it."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from eval.errors import EvalError
from eval.scoring import normalize_answer
from eval.statistics import Interval, bootstrap_mean, paired_bootstrap
from inputs import Context, Example
from retrieval.chunk import Chunk
from retrieval.documents import Document
from retrieval.embedding import SentenceEmbedder
from retrieval.index import CorpusIndex, Hit

RANDOM_DRAWS = 1_000
EMBEDDED_AT_ONCE = 32

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the retriever and of random choice, 0 to 1, averaged over questions.

    Attributes:
        retriever: mean and 95 % bootstrap interval over questions.
        random_expected: what choosing k contexts at random gives on average, exactly.
        random_drawn: the same from seeded draws, with its interval over questions.
    """

    retriever: Interval
    random_expected: float
    random_drawn: Interval


@dataclass(frozen=True, slots=True)
class AnswersHeld:
    """Share of all questions that have a context whose text holds one of their answers.

    Attributes:
        retrieved: among the retrieved contexts, with the 95 % bootstrap interval over questions.
        own: among the contexts that the data give the question.
        difference: the former less the latter, paired by question.
    """

    retrieved: Interval
    own: Interval
    difference: Interval


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was counted and measured; ``metrics`` has ``hit@k`` and ``recall@k`` of the questions with gold."""

    questions: int
    left_out: int
    contexts: int
    metrics: dict[str, Metric]
    answers_held: AnswersHeld


def holds_answer(text: str, answer: str) -> bool:
    """Whether ``text`` holds ``answer`` as whole words, both normalised as SQuAD does.

    The last word may carry an s: normalisation glues a possessive's to its word ("Nazareth's"), and a
    plural names the thing as well.
    """
    wanted = normalize_answer(answer)
    pattern = rf"(?<!\S){re.escape(wanted)}s?(?!\S)"
    return bool(wanted) and re.search(pattern, normalize_answer(text)) is not None


def gold_contexts(example: Example) -> list[Context]:
    """Return the supporting contexts or, where the data do not tell, those that hold one of the answers."""
    if any(context.supporting is not None for context in example.contexts):
        return [context for context in example.contexts if context.supporting]
    return [
        context for context in example.contexts if any(holds_answer(context.text, answer) for answer in example.answers)
    ]


def as_chunk(context: Context, name: str = "") -> Chunk:
    """Return a context as one chunk."""
    return Chunk.whole(Document(name, context.text, context.title))


def index_contexts(
    contexts: Sequence[Context], embedder: SentenceEmbedder, advance: Advance = lambda count: None
) -> CorpusIndex:
    """Return an index over ``contexts``, one chunk each; ``advance`` gets the number just embedded.

    A chunk's document id is its context's place in ``contexts``.
    """
    index = CorpusIndex(embedder)
    chunks = [as_chunk(context, str(place)) for place, context in enumerate(contexts)]
    for start in range(0, len(chunks), EMBEDDED_AT_ONCE):
        batch = chunks[start : start + EMBEDDED_AT_ONCE]
        index.add(batch)
        advance(len(batch))
    return index


def search(
    examples: Sequence[Example], index: CorpusIndex, k: int, advance: Advance = lambda count: None
) -> list[list[Hit]]:
    """Return the best ``k`` contexts for each question, best first; ``advance`` gets 1 after each question.

    Raises:
        RetrievalError: ``k`` is below 1.
    """
    found = []
    for example in examples:
        found.append(index.search(example.question, k))
        advance(1)
    return found


def evaluate(
    examples: Sequence[Example], found: Sequence[Sequence[Hit]], contexts: int, k: int, seed: int
) -> Evaluation:
    """Return hit@k and recall@k of what was found beside random choice, and how often an answer is there.

    Args:
        examples: the questions.
        found: what ``search`` returned for them.
        contexts: how many were searched.
        k: contexts retrieved for a question.
        seed: of resampling and of the random draws.

    Raises:
        EvalError: no question has gold.
    """
    gold = [{as_chunk(context).id for context in gold_contexts(example)} for example in examples]
    sizes = np.array([len(ids) for ids in gold])
    if not sizes.any():
        raise EvalError("No question has a context that answers it; give data with supporting contexts.")
    right = np.array([sum(hit.chunk.id in ids for hit in hits) for hits, ids in zip(found, gold, strict=True)])
    has_gold = sizes > 0
    return Evaluation(
        questions=int(has_gold.sum()),
        left_out=int((~has_gold).sum()),
        contexts=contexts,
        metrics=_metrics(right[has_gold], sizes[has_gold], contexts, k, seed),
        answers_held=_answers_held(examples, found, seed),
    )


def _answers_held(examples: Sequence[Example], found: Sequence[Sequence[Hit]], seed: int) -> AnswersHeld:
    retrieved = [
        _any_holds((hit.chunk.body for hit in hits), example) for example, hits in zip(examples, found, strict=True)
    ]
    own = [_any_holds((context.text for context in example.contexts), example) for example in examples]
    return AnswersHeld(
        bootstrap_mean(retrieved, seed=seed),
        bootstrap_mean(own, seed=seed),
        paired_bootstrap(retrieved, own, seed=seed),
    )


def _any_holds(texts: Iterable[str], example: Example) -> bool:
    return any(holds_answer(text, answer) for text in texts for answer in example.answers)


def _metrics(found: NDArray[np.int64], sizes: NDArray[np.int64], contexts: int, k: int, seed: int) -> dict[str, Metric]:
    """Return the metrics from the number of gold contexts found and there, int64 [questions]."""
    k = min(k, contexts)
    misses = np.array([comb(contexts - size, k) / comb(contexts, k) for size in sizes.tolist()])
    # How many gold contexts are among k chosen at random, [draws, questions].
    drawn = np.random.default_rng(seed).hypergeometric(sizes, contexts - sizes, k, (RANDOM_DRAWS, sizes.size))
    return {
        f"hit@{k}": Metric(
            bootstrap_mean(found > 0, seed=seed),
            float((1 - misses).mean()),
            bootstrap_mean((drawn > 0).mean(axis=0), seed=seed),
        ),
        f"recall@{k}": Metric(
            bootstrap_mean(found / sizes, seed=seed),
            k / contexts,
            bootstrap_mean((drawn / sizes).mean(axis=0), seed=seed),
        ),
    }
