"""`SessionPredictor`: what queued questions need, and what sessions will probably ask for next. Imports no torch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from cacheblend.protocols import (
    Advice,
    CandidatesSeen,
    PredictorEvent,
    QuestionFinished,
    QuestionQueued,
    QuestionStarted,
    TokensGenerated,
)
from cacheblend.scheduling.online_rates import Popularity, Rate, Returns, WaitingTimes, octave_of
from kvstore.key import ChunkIdentity, ChunkKey

HORIZON = 16
"""Confidence is the chance that a chunk is used by one of this many next questions."""
LEAST_CONFIDENCE = 0.02
"""Chunks less likely than this are not advised."""
OLDEST = 16
"""Turns ago from which on documents of a session are alike."""
OFTEN = 3
"""Uses in a session from which on its documents are alike."""


@dataclass(slots=True)
class _Question:
    chunks: tuple[ChunkIdentity, ...]
    session: str | None
    generated: int = 0


@dataclass(slots=True)
class _Document:
    chunk: ChunkIdentity
    last_turn: int = 0
    uses: int = 0


@dataclass(slots=True)
class _Session:
    turn: int = 0
    used: OrderedDict[ChunkKey, _Document] = field(default_factory=OrderedDict)
    candidates: tuple[ChunkIdentity, ...] = ()
    answering: str | None = None


class SessionPredictor:
    """Implements `cacheblend.protocols.SpeculativePredictor`. Not thread-safe.

    Four sources, each believed as far as it came true so far:

    * Queued questions: their chunks, in the order of the queue, as surely as queued questions start at all.
    * Sessions: documents of earlier turns come back in other orders. How often they do is learned by how many turns
      ago and how often they were used; how soon a session asks again, by how many questions others have asked since
      its answer; and while the answer is being generated, how soon it ends, by its tokens so far.
    * Candidates beyond top-k, by rank: a later turn of the session may pick them.
    * Popularity among sessions that did not use a chunk before, by rank; it decays.

    The questions without a session are taken for the turns of one. An event costs O(documents of one session).

    Args:
        sessions: sessions remembered; those that asked least recently are dropped.
        documents: chunks remembered of a session; those used least recently are dropped.
        questions: questions remembered that are queued or being answered; the oldest are dropped.
        popular: chunks whose popularity is remembered.
    """

    def __init__(self, sessions: int = 1024, documents: int = 128, questions: int = 4096, popular: int = 4096) -> None:
        self._limits = (sessions, documents, questions)
        self._queued: OrderedDict[str, _Question] = OrderedDict()
        self._answering: OrderedDict[str, _Question] = OrderedDict()
        self._sessions: OrderedDict[str | None, _Session] = OrderedDict()
        self._popularity = Popularity(remembered=popular)
        self._asked = 0
        self._returns: Returns[str | None] = Returns()
        self._answer_ends = WaitingTimes()
        self._answer_tokens = 64.0
        self._starts = Rate(19, 1)
        self._reappears: defaultdict[tuple[bool, int, int], Rate] = defaultdict(Rate)
        self._picked: defaultdict[tuple[bool, int], Rate] = defaultdict(partial(Rate, 1, 7))

    def observe(self, event: PredictorEvent) -> None:
        """See `SpeculativePredictor.observe`."""
        if isinstance(event, TokensGenerated):
            if event.request_id in self._answering:
                self._answering[event.request_id].generated += len(event.token_ids)
        elif isinstance(event, QuestionQueued):
            self._queue(event)
        elif isinstance(event, CandidatesSeen):
            question = self._queued.get(event.request_id)
            if question is not None and question.session in self._sessions:
                self._sessions[question.session].candidates = event.chunks
        elif isinstance(event, QuestionStarted):
            self._start(event.request_id)
        else:
            self._finish(event)

    def advice(self, limit: int) -> list[Advice]:
        """See `SpeculativePredictor.advice`: every chunk that is likely now, not only what is new."""
        queued = self._wanted(limit)
        missed: dict[ChunkKey, float] = {}
        chunks: dict[ChunkKey, ChunkIdentity] = {}
        for chunk, chance in [*self._of_sessions(limit), *self._popularity.likely(HORIZON)]:
            missed[chunk.key] = missed.get(chunk.key, 1.0) * (1 - chance)
            chunks[chunk.key] = chunk
        likely = [
            Advice(chunks[key], 1 - miss)
            for key, miss in missed.items()
            if key not in queued and 1 - miss >= LEAST_CONFIDENCE
        ]
        return sorted([*queued.values(), *likely], key=lambda piece: -piece.confidence)[:limit]

    def close(self) -> None:
        """See `SpeculativePredictor.close`: nothing is held."""

    def _queue(self, event: QuestionQueued) -> None:
        if event.request_id in self._queued:
            return
        self._asked += 1
        self._returns.pass_time(self._asked)
        self._queued[event.request_id] = _Question(event.chunks, event.session_id)
        session = self._sessions.setdefault(event.session_id, _Session())
        self._sessions.move_to_end(event.session_id)
        if session.turn:
            self._returns.come_back(event.session_id, self._asked)
        self._judge(session, event)
        self._popularity.use(event.chunks, session.used)
        session.turn += 1
        session.candidates = ()
        session.answering = event.request_id
        for chunk in event.chunks:
            document = session.used.setdefault(chunk.key, _Document(chunk))
            document.last_turn = session.turn
            document.uses += 1
            session.used.move_to_end(chunk.key)
        self._forget_beyond_limits(session)

    def _judge(self, session: _Session, event: QuestionQueued) -> None:
        """What was expected of the session's next turn, against what it uses."""
        used = {chunk.key for chunk in event.chunks}
        anonymous = event.session_id is None
        for key, document in session.used.items():
            self._reappears[anonymous, *_history(session, document)].add(key in used, key not in used)
        for rank, chunk in enumerate(session.candidates, start=1):
            if chunk.key not in session.used:
                self._picked[anonymous, octave_of(rank)].add(chunk.key in used, chunk.key not in used)

    def _start(self, request_id: str) -> None:
        question = self._queued.pop(request_id, None)
        if question is not None:
            self._starts.add(1)
            self._answering[request_id] = question

    def _finish(self, event: QuestionFinished) -> None:
        question = self._queued.pop(event.request_id, None)
        if question is not None:
            self._starts.add(0, 1)
        else:
            question = self._answering.pop(event.request_id, None)
        if question is None:
            return
        if question.generated:
            for octave in range(octave_of(question.generated)):
                self._answer_ends.survived(octave)
            self._answer_ends.ended(question.generated)
            self._answer_tokens += 0.1 * (question.generated - self._answer_tokens)
        session = self._sessions.get(question.session)
        if session is not None and session.answering == event.request_id:
            session.answering = None
            self._returns.leave(question.session, self._asked)

    def _forget_beyond_limits(self, session: _Session) -> None:
        sessions, documents, questions = self._limits
        while len(session.used) > documents:
            session.used.popitem(last=False)
        while len(self._sessions) > sessions:
            self._returns.forget(self._sessions.popitem(last=False)[0])
        for group in (self._queued, self._answering):
            while len(group) > questions:
                group.popitem(last=False)

    def _wanted(self, limit: int) -> dict[ChunkKey, Advice]:
        wanted: dict[ChunkKey, Advice] = {}
        for question in self._queued.values():
            if len(wanted) >= limit:
                break
            for chunk in question.chunks:
                wanted.setdefault(chunk.key, Advice(chunk, self._starts.mean))
        return wanted

    def _of_sessions(self, limit: int) -> Iterable[tuple[ChunkIdentity, float]]:
        """Documents and candidates of the sessions that will most probably ask soon, with their chances."""
        asking = [(self._asks_soon(name, session), name) for name, session in self._sessions.items()]
        asking.sort(key=lambda pair: -pair[0])
        found = 0
        for soon, name in asking:
            if soon < LEAST_CONFIDENCE or found >= 4 * limit:
                return
            session, anonymous = self._sessions[name], name is None
            for document in session.used.values():
                yield document.chunk, soon * self._reappears[anonymous, *_history(session, document)].mean
            for rank, chunk in enumerate(session.candidates, start=1):
                if chunk.key not in session.used:
                    yield chunk, soon * self._picked[anonymous, octave_of(rank)].mean
            found += len(session.used)

    def _asks_soon(self, name: str | None, session: _Session) -> float:
        if name is None:
            return 1.0
        if session.answering is None:
            return self._returns.soon(name, self._asked, HORIZON)
        question = self._answering.get(session.answering)
        if question is None:
            return 0.0
        ends = self._answer_ends.soon(question.generated, max(1, round(self._answer_tokens / 2)))
        return ends * self._returns.soon(name, self._asked, HORIZON)


def _history(session: _Session, document: _Document) -> tuple[int, int]:
    """Turns from the document's last use to the session's next turn, and its uses, as far as they are told apart."""
    return min(session.turn + 1 - document.last_turn, OLDEST), min(document.uses, OFTEN)
