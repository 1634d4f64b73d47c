"""A stream of requests with the documents that each one needs: from recorded sessions, or drawn by Zipf's law."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eval.errors import EvalError
from eval.trace.recording import Recording, draw_tokens

KV_BYTES_PER_TOKEN = 131_072
"""Of Llama-3-8B's shape in bf16: 32 layers, 8 heads of 128, keys and values, 2 bytes each."""

MEAN_SESSION_GAP_S = 20.0
MEAN_THINK_S = 30.0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One question.

    Attributes:
        arrival_s: seconds after the start of the trace.
        session: whose question it is.
        turn: its place in the session, from 1.
        documents: what its prompt holds, in prompt order, none twice; a few questions have none.
        candidates: what the retriever ranked next, best first; not part of the prompt.
    """

    arrival_s: float
    session: str
    turn: int
    documents: tuple[str, ...]
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival, and the tokens of each document that they name.

    Attributes:
        requests: by `arrival_s`, ascending.
        tokens: document to number of tokens, for every document and candidate of the requests.
    """

    requests: tuple[TraceRequest, ...]
    tokens: Mapping[str, int]

    def nbytes(self, document: str) -> int:
        """Bytes of a document's KV."""
        return self.tokens[document] * KV_BYTES_PER_TOKEN

    @property
    def used(self) -> tuple[str, ...]:
        """The documents in some prompt, each once, in order of first use."""
        return tuple(dict.fromkeys(document for request in self.requests for document in request.documents))

    @property
    def distinct_bytes(self) -> int:
        """Bytes of KV of all documents in some prompt, each counted once."""
        return sum(map(self.nbytes, self.used))


def interleave(
    recording: Recording,
    seed: int,
    mean_session_gap_s: float = MEAN_SESSION_GAP_S,
    mean_think_s: float = MEAN_THINK_S,
) -> Workload:
    """Return the sessions of `recording` in a drawn order and with drawn times, as one stream of requests.

    Sessions begin as a Poisson process; within one, exponential think times separate the arrivals of its
    questions. Arrivals do not depend on how fast questions are answered, so every policy sees the same stream.

    Args:
        recording: the sessions.
        seed: of order and times.
        mean_session_gap_s: mean seconds between the beginnings of two sessions.
        mean_think_s: mean seconds between two questions of a session.

    Raises:
        EvalError: a mean is not above 0.
    """
    if not (mean_session_gap_s > 0 and mean_think_s > 0):
        raise EvalError(
            f"Mean times of {mean_session_gap_s} s between sessions and {mean_think_s} s between questions are not "
            "possible; give numbers above 0."
        )
    draw = random.Random(seed)
    sessions = list(recording.sessions)
    draw.shuffle(sessions)
    requests = []
    beginning = 0.0
    for session in sessions:
        beginning += draw.expovariate(1 / mean_session_gap_s)
        arrival = beginning
        for number, turn in enumerate(session.turns, start=1):
            requests.append(TraceRequest(arrival, session.id, number, turn.documents, turn.candidates))
            arrival += draw.expovariate(1 / mean_think_s)
    requests.sort(key=lambda request: (request.arrival_s, request.session, request.turn))
    return Workload(tuple(requests), recording.tokens)


def zipf(requests: int, documents: int, exponent: float, top_k: int, seed: int) -> Workload:
    """Return independent requests, one a second on average, whose documents are drawn by Zipf's law.

    The document of rank r is drawn with a probability proportional to r ** -exponent, `top_k` different ones a
    request; a document's size has nothing to do with its rank. There are no candidates.

    Args:
        requests: how many.
        documents: how many there are to draw from.
        exponent: 0 makes all equally popular.
        top_k: documents a request.
        seed: of draws, sizes and times.

    Raises:
        EvalError: a number is below 1, `top_k` is above `documents`, or `exponent` is below 0.
    """
    if min(requests, top_k) < 1 or top_k > documents or exponent < 0:
        raise EvalError(
            f"{requests} requests for {top_k} of {documents} documents by Zipf's law with exponent {exponent} are not "
            "possible; give at least 1 request, 1 to all documents a request, and an exponent of 0 or more."
        )
    draw = np.random.default_rng(seed)
    names = [f"document-{rank}" for rank in range(1, documents + 1)]
    weights = np.arange(1, documents + 1, dtype=np.float64) ** -exponent
    chosen = [draw.choice(documents, top_k, replace=False, p=weights / weights.sum()) for _ in range(requests)]
    arrivals = np.cumsum(draw.exponential(1.0, requests)).tolist()
    stream = tuple(
        TraceRequest(arrival, f"request-{number}", 1, tuple(names[place] for place in places))
        for number, (arrival, places) in enumerate(zip(arrivals, chosen, strict=True))
    )
    return Workload(stream, dict(zip(names, draw_tokens(documents, random.Random(seed)), strict=True)))
