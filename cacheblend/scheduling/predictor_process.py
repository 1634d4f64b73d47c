"""`ProcessPredictor`: a predictor in its own process, which may hang or die and nobody waits. Imports no torch."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import replace

from cacheblend.errors import BlendError
from cacheblend.protocols import (
    Advice,
    CandidatesSeen,
    PredictorEvent,
    QuestionFinished,
    QuestionQueued,
    QuestionStarted,
    TokensGenerated,
)
from cacheblend.scheduling.predictor_frames import AdviceChange, PredictorSpec
from cacheblend.scheduling.predictor_watch import PredictorWatch
from kvstore.key import ChunkIdentity, ChunkKey

CHUNKS_KNOWN = 4096
"""Chunks that can be advised: those that events named last."""
QUEUED_KNOWN = 4096
"""Queued questions that a new process is told of."""
BATCH = 1024
"""Events sent at a time."""


class ProcessPredictor:
    """Implements `cacheblend.protocols.SpeculativePredictor` by another process's advice.

    `observe` and `advice` never block, whatever that process does: events go to a bounded queue, whose oldest are
    dropped when it is full, and a thread writes them on when advice is asked for, a quarter of a second later at the
    latest, reads advice and watches over the process. One that ends or
    gives no sign of life is killed and started anew, after a growing pause and so many times a minute at most, and
    told of the questions that are still queued. Both are for one thread; token ids of chunks stay in this process.

    Args:
        make: the predictor to run.
        queue_size: events that wait for the process, at most.
        silence_s: seconds without a sign of life after which the process is taken for hung.
        stale_s: seconds after which advice is not handed out any more.
        restarts_per_minute: how often the process is started anew within a minute, at most.

    Raises:
        BlendError: a queue of no events, or no restart a minute.
    """

    def __init__(
        self,
        make: PredictorSpec | None = None,
        queue_size: int = 8192,
        silence_s: float = 5.0,
        stale_s: float = 2.0,
        restarts_per_minute: int = 6,
    ) -> None:
        if min(queue_size, restarts_per_minute) < 1:
            raise BlendError(
                f"A predictor's process needs a queue of 1 event or more, not {queue_size}, and 1 restart a minute or "
                f"more, not {restarts_per_minute}."
            )
        self._stale_s = stale_s
        self._waiting: deque[PredictorEvent] = deque(maxlen=queue_size)
        self._queued: OrderedDict[str, list[PredictorEvent]] = OrderedDict()
        self._arrived: deque[tuple[float, list[Advice]]] = deque(maxlen=64)
        self._pending: dict[ChunkKey, tuple[float, Advice]] = {}
        self._stand_ins = _StandIns(CHUNKS_KNOWN)
        self._said_at: float | None = None
        self._dropped = 0
        self._discarded = 0
        self._closed = False
        self._watch = PredictorWatch(
            make or PredictorSpec(), self._take, self._catch_up, self._deliver, silence_s, restarts_per_minute
        )
        self._thread = threading.Thread(target=self._watch.run, name="predictor-watch", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Events that no process was told of: the queue was full, or they waited for one that is lost."""
        return self._dropped + self._discarded

    @property
    def restarts(self) -> int:
        """How often the process was started anew."""
        return self._watch.restarts

    @property
    def advice_age_s(self) -> float | None:
        """Seconds since the process last said what it advises; None before it has."""
        return None if self._said_at is None else time.monotonic() - self._said_at

    @property
    def pid(self) -> int | None:
        """Id of the predictor's process; None while there is none."""
        return self._watch.pid

    def observe(self, event: PredictorEvent) -> None:
        """See `SpeculativePredictor.observe`; when the queue is full, its oldest event is dropped and counted."""
        if self._closed:
            return
        self._note_queued(event)
        self._dropped += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(event)

    def advice(self, limit: int) -> list[Advice]:
        """What is new or has changed since it was handed out, most confident first; O(1) when nothing is.

        A piece that still holds is handed out again after a second, because what could not be followed then may be
        now. Confidence 0 takes a piece back. Pieces said more than `stale_s` ago are dropped instead.
        """
        if self._waiting:
            # Not as soon as there is an event: the thread would take the interpreter from a request on its way in.
            self._watch.wake()
        if self._arrived:
            self._merge()
        now = time.monotonic()
        handed_out: list[Advice] = []
        while self._pending and len(handed_out) < limit:
            said_at, piece = self._pending.pop(next(iter(self._pending)))
            if now - said_at <= self._stale_s:
                handed_out.append(piece)
        return handed_out

    def close(self) -> None:
        """End the process and the thread, within seconds; closing again does nothing. No advice comes afterwards."""
        if not self._closed:
            self._closed = True
            self._watch.stop()
            self._thread.join()
            self._arrived.clear()
            self._pending.clear()

    def _note_queued(self, event: PredictorEvent) -> None:
        if isinstance(event, QuestionQueued):
            self._queued[event.request_id] = [event]
            if len(self._queued) > QUEUED_KNOWN:
                self._queued.popitem(last=False)
        elif isinstance(event, CandidatesSeen) and event.request_id in self._queued:
            self._queued[event.request_id] = [self._queued[event.request_id][0], event]
        elif isinstance(event, QuestionStarted | QuestionFinished):
            self._queued.pop(event.request_id, None)

    def _merge(self) -> None:
        while self._arrived:
            said_at, pieces = self._arrived.popleft()
            self._pending.update((piece.chunk.key, (said_at, piece)) for piece in pieces)
        oldest = time.monotonic() - self._stale_s
        fresh = [entry for entry in self._pending.items() if entry[1][0] >= oldest]
        self._pending = dict(sorted(fresh, key=lambda entry: -entry[1][1].confidence))

    # What follows is called by the watching thread.

    def _take(self) -> list[PredictorEvent]:
        events: list[PredictorEvent] = []
        while self._waiting and len(events) < BATCH:
            events.append(self._waiting.popleft())
        return [self._stand_ins.replace_in(event) for event in _with_tokens_together(events)]

    def _catch_up(self) -> list[PredictorEvent]:
        # What waits is of the past or among the queued. Emptied first: what is queued now is told twice, not never.
        self._discarded += len(self._waiting)
        self._waiting.clear()
        queued = self._queued.copy()
        return [self._stand_ins.replace_in(event) for events in queued.values() for event in events]

    def _deliver(self, change: AdviceChange) -> None:
        self._said_at = change.said_at
        named = ((self._stand_ins.chunk(number), confidence) for number, confidence in change.pieces)
        pieces = [Advice(chunk, confidence) for chunk, confidence in named if chunk is not None]
        if pieces:
            self._arrived.append((change.said_at, pieces))


class _StandIns:
    """Small chunks that stand for large ones in messages: their one token id is a number given here."""

    def __init__(self, known: int) -> None:
        self._known = known
        self._numbers: OrderedDict[ChunkKey, ChunkIdentity] = OrderedDict()
        self._chunks: dict[int, ChunkIdentity] = {}
        self._next = 0

    def replace_in(self, event: PredictorEvent) -> PredictorEvent:
        """The event with stand-ins for its chunks."""
        if isinstance(event, QuestionQueued | CandidatesSeen):
            return replace(event, chunks=tuple(map(self._stand_in, event.chunks)))
        return event

    def chunk(self, number: int) -> ChunkIdentity | None:
        """The chunk a number stands for, None if it was forgotten."""
        return self._chunks.get(number)

    def _stand_in(self, chunk: ChunkIdentity) -> ChunkIdentity:
        stand_in = self._numbers.get(chunk.key)
        if stand_in is None:
            stand_in = ChunkIdentity("stand-in", (), (self._next,))
            self._numbers[chunk.key] = stand_in
            self._chunks[self._next] = chunk
            self._next += 1
            if len(self._numbers) > self._known:
                _, forgotten = self._numbers.popitem(last=False)
                del self._chunks[forgotten.token_ids[0]]
        self._numbers.move_to_end(chunk.key)
        return stand_in


def _with_tokens_together(events: Iterable[PredictorEvent]) -> list[PredictorEvent]:
    """One event for all tokens of a request in a row of events, at the place of the first."""
    together: list[PredictorEvent] = []
    tokens: dict[str, int] = {}
    for event in events:
        if not isinstance(event, TokensGenerated):
            together.append(event)
            tokens.pop(event.request_id, None)
        elif event.request_id in tokens:
            place = tokens[event.request_id]
            earlier = together[place]
            assert isinstance(earlier, TokensGenerated)
            together[place] = TokensGenerated(event.request_id, earlier.token_ids + event.token_ids)
        else:
            tokens[event.request_id] = len(together)
            together.append(event)
    return together
