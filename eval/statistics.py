"""Intervals, percentiles and divergences."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eval.errors import EvalError

RESAMPLES = 10_000
# Indices drawn at once, so that memory stays at some 32 MB whatever the number of questions.
DRAWN_AT_ONCE = 4_000_000
# How far the log of a distribution's sum may be from 0 before it is taken for logits.
NORMALISED_WITHIN = 0.01


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % bootstrap interval, in the unit of the values."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and 95th percentile, in the unit of the values."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class AnswerDivergence:
    """KL(full || arm) in nats: at the first answer token, and the mean along full prefill's answer."""

    first: float
    answer: float


def bootstrap_mean(values: ArrayLike, n: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the mean of ``values`` with the 95 % percentile interval of ``n`` resamples of the questions.

    Args:
        values: one number a question, shape ``[questions]``.
        n: number of resamples.
        seed: of the resampling; the same seed gives the same interval.

    Raises:
        EvalError: there are no values, or one is not finite.
    """
    sample = _finite_vector(values)
    generator = np.random.default_rng(seed)
    rows = max(1, DRAWN_AT_ONCE // sample.size)
    means = np.concatenate(
        [
            sample[generator.integers(sample.size, size=(min(rows, n - done), sample.size))].mean(axis=1)
            for done in range(0, n, rows)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(sample.mean()), float(low), float(high))


def paired_bootstrap(a: ArrayLike, b: ArrayLike, n: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the mean of ``a - b`` with its 95 % interval, resampling questions and keeping their pairs.

    Args:
        a: one number a question, shape ``[questions]``.
        b: the other arm's, for the same questions in the same order.
        n: number of resamples.
        seed: of the resampling.

    Raises:
        EvalError: the two differ in length, are empty, or hold a number that is not finite.
    """
    first, second = _finite_vector(a), _finite_vector(b)
    if first.size != second.size:
        raise EvalError(f"Paired values need the same questions, not {first.size} and {second.size} of them.")
    return bootstrap_mean(first - second, n, seed)


def percentiles(values: ArrayLike) -> Percentiles:
    """Return p50 and p95 of ``values``, linearly interpolated.

    Raises:
        EvalError: there are no values, or one is not finite.
    """
    p50, p95 = np.percentile(_finite_vector(values), (50, 95))
    return Percentiles(float(p50), float(p95))


def kl_divergence(log_p: Any, log_q: Any) -> NDArray[np.float64]:
    """Return KL(p || q) in nats over the whole vocabulary, one number a distribution.

    Args:
        log_p: log-probabilities, array or tensor, shape ``[..., vocabulary]``, any float dtype; ``p`` is full
            prefill's.
        log_q: the arm's, same shape.

    Returns:
        float64 of shape ``[...]``, at least 0; infinite where ``q`` rules out what ``p`` allows.

    Raises:
        EvalError: the shapes differ, or the last axis does not sum to 1 (logits were given, or a part of the
            vocabulary).
    """
    p, q = _log_probabilities(log_p), _log_probabilities(log_q)
    if p.shape != q.shape:
        raise EvalError(f"A divergence needs two distributions of one shape, not {p.shape} and {q.shape}.")
    weights = np.exp(p)
    with np.errstate(invalid="ignore"):
        terms = np.where(weights > 0, weights * (p - q), 0.0)
    return np.maximum(terms.sum(axis=-1), 0.0)


def answer_divergence(log_p: Any, log_q: Any) -> AnswerDivergence:
    """Return the divergence at the first token and the mean along an answer, both in nats.

    Args:
        log_p: full prefill's log-probabilities along its own answer, shape ``[answer tokens, vocabulary]``.
        log_q: the arm's, forced along the same answer, same shape.

    Raises:
        EvalError: as ``kl_divergence``, or the answer has no token.
    """
    divergence = kl_divergence(log_p, log_q)
    if divergence.ndim != 1 or not divergence.size:
        raise EvalError(f"An answer's divergence needs [answer tokens, vocabulary], not {np.shape(log_p)}.")
    return AnswerDivergence(float(divergence[0]), float(divergence.mean()))


def _finite_vector(values: ArrayLike) -> NDArray[np.float64]:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or not vector.size:
        raise EvalError(f"Statistics need a list of at least one number, not one of shape {vector.shape}.")
    if not np.isfinite(vector).all():
        where = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise EvalError(f"Statistics need finite numbers, but number {where} is {vector[where]}.")
    return vector


def _log_probabilities(values: Any) -> NDArray[np.float64]:
    """Convert to float64 and normalise what rounding left of the sum."""
    # numpy knows no bfloat16, so tensors are widened by torch first.
    wide = values.detach().double().cpu() if hasattr(values, "detach") else values
    logs = np.asarray(wide, dtype=np.float64)
    if not logs.ndim or not logs.shape[-1]:
        raise EvalError(f"Log-probabilities need a vocabulary, but their shape is {logs.shape}.")
    with np.errstate(invalid="ignore"):
        peak = logs.max(axis=-1, keepdims=True)
        log_sum = peak + np.log(np.exp(logs - peak).sum(axis=-1, keepdims=True))
    worst = float(np.max(np.abs(log_sum), initial=0.0))
    if not worst <= NORMALISED_WITHIN:
        raise EvalError(
            f"Log-probabilities must sum to 1 over the vocabulary, but the log of a sum is {worst:.3g} away "
            f"from 0: apply log_softmax in float32 to all logits."
        )
    return logs - log_sum
