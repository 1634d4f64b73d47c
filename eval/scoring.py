"""Scores of one predicted answer.

``exact_match`` and ``f1`` are MuSiQue's official answer metrics (those of SQuAD 2.0). ``token_f1`` is the F1
that CacheBlend reports, over the model's tokens instead of words. ``agrees`` compares with full prefill.

Articles and ASCII punctuation are all that normalisation removes: accents and other scripts stay.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from eval.errors import EvalError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


class Tokenizer(Protocol):
    """What ``token_f1`` asks of a tokenizer; those of transformers offer it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``, without BOS and EOS if ``add_special_tokens`` is False."""
        ...


def normalize_answer(text: str) -> str:
    """Lower-case, strip punctuation, drop articles, collapse white space: in the official script's order.

    >>> normalize_answer("  The  U.S.A.,  a country")
    'usa country'
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def first_line(prediction: str) -> str:
    """Return the first line that is not blank, stripped: the answer, without what a model adds below it."""
    return prediction.strip().partition("\n")[0].rstrip()


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction equals one of ``answers`` (answer and aliases) once normalised, else 0.0.

    Raises:
        EvalError: ``answers`` is empty or a bare string.
    """
    predicted = normalize_answer(prediction)
    return _best(lambda answer: float(normalize_answer(answer) == predicted), answers)


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the best F1 of shared words, in 0 to 1, over ``answers`` (answer and aliases).

    Where nothing is left of prediction or answer once normalised, it is 1.0 if both are empty, else 0.0.

    Raises:
        EvalError: ``answers`` is empty or a bare string.
    """
    predicted = normalize_answer(prediction).split()
    return _best(lambda answer: _bag_f1(predicted, normalize_answer(answer).split()), answers)


def token_f1(prediction: str, answers: Sequence[str], tokenizer: Tokenizer) -> float:
    """Return CacheBlend's F1: the same over the tokenizer's ids of the normalised first line.

    CacheBlend cuts every first line that starts with "No" or "Yes" to that word, "Norway" and "November"
    among them. MuSiQue asks no yes-or-no questions, so nothing is cut here.

    Raises:
        EvalError: ``answers`` is empty or a bare string.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(normalize_answer(text), add_special_tokens=False)

    predicted = ids(first_line(prediction))
    return _best(lambda answer: _bag_f1(predicted, ids(answer)), answers)


def agrees(prediction: str, full_prefill: str) -> bool:
    """Whether both answers' first lines are equal once normalised; agreement is the share that is."""
    return normalize_answer(first_line(prediction)) == normalize_answer(first_line(full_prefill))


def _best(score: Callable[[str], float], answers: Sequence[str]) -> float:
    if isinstance(answers, str) or not answers:
        raise EvalError(f"A prediction is scored against a list of at least one answer, not {answers!r}.")
    return max(score(answer) for answer in answers)


def _bag_f1(predicted: Sequence[Hashable], gold: Sequence[Hashable]) -> float:
    if not predicted or not gold:
        return float(not predicted and not gold)
    shared = (Counter(predicted) & Counter(gold)).total()
    return 2 * shared / (len(predicted) + len(gold))


def first_line_ids(tokenizer: Any, token_ids: Sequence[int]) -> list[int]:
    """Return the ids up to the one that ends the first line that is not blank; all of them if none does."""
    for end in range(1, len(token_ids)):
        if "\n" in tokenizer.decode(token_ids[:end], skip_special_tokens=True).lstrip():
            return list(token_ids[:end])
    return list(token_ids)
