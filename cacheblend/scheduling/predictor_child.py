"""The predictor's own process: `python -m cacheblend.scheduling.predictor_child PARENT_PID`. Imports no torch.

It reads events from standard input and writes changes of advice to standard output, waits for neither, and ends when
its input does or its parent is gone. The first message is the `PredictorSpec`.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from cacheblend.protocols import Advice, SpeculativePredictor
from cacheblend.scheduling.predictor_frames import AdviceChange, EventBatch, FrameReader, FrameWriter, PredictorSpec

HEARTBEAT_S = 0.25
"""Longest silence of a living process; advice that holds is not said again for it."""
PAUSE_S = 0.02
"""Least time between two looks at what to advise: events that come meanwhile are taken together."""
SHARE = 0.1
"""Share of a core that it takes at most, whatever comes: after dear work it pauses the longer."""
REPEAT_S = 1.0
"""Advice that still holds is said again after so long: what could not be followed then may be now."""
CHANGE = 0.05
"""A confidence that differs by less from what was said is not said again before `REPEAT_S`."""
PIECES = 128
"""Chunks advised at a time."""


class AdviceChanges:
    """Remembers what was said, so that only what is new or has changed is said."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[int, tuple[float, float]] = {}

    def of(self, advice: list[Advice]) -> AdviceChange:
        """What to say now, most confident first, what is taken back last."""
        now = self._clock()
        current = {piece.chunk.token_ids[0]: piece.confidence for piece in advice}
        pieces = [(number, confidence) for number, confidence in current.items() if self._is_news(number, confidence)]
        gone = [number for number in self._said if number not in current]
        for number in gone:
            del self._said[number]
        self._said.update((number, (confidence, now)) for number, confidence in pieces)
        return AdviceChange(now, (*pieces, *((number, 0.0) for number in gone)))

    def _is_news(self, number: int, confidence: float) -> bool:
        if number not in self._said:
            return True
        before, said_at = self._said[number]
        return abs(before - confidence) >= CHANGE or self._clock() - said_at >= REPEAT_S


def make_predictor(spec: PredictorSpec) -> SpeculativePredictor:
    """Import and call what `spec` names."""
    module, _, name = spec.target.partition(":")
    made: SpeculativePredictor = getattr(importlib.import_module(module), name)(**spec.arguments)
    return made


def serve(parent: int, source: int, sink: int) -> None:
    """Predict until `source` ends or `parent` is not this process's parent any more.

    Args:
        parent: process id.
        source: file descriptor of messages from the engine.
        sink: file descriptor of messages to it.
    """
    os.set_blocking(source, False)
    os.set_blocking(sink, False)
    reader, writer, changes = FrameReader(source), FrameWriter(sink), AdviceChanges()
    predictor: SpeculativePredictor | None = None
    while os.getppid() == parent:
        select.select([source], [sink] if writer.busy else [], [], HEARTBEAT_S)
        began = time.monotonic()
        for message in reader.messages():
            if isinstance(message, PredictorSpec):
                predictor = make_predictor(message)
            elif isinstance(message, EventBatch) and predictor is not None:
                for event in message.events:
                    predictor.observe(event)
        if reader.ended:
            return
        # While the engine does not read, no more is said: it takes the newest advice, not all of it.
        if predictor is not None and not writer.busy:
            writer.put(changes.of(predictor.advice(PIECES)))
        writer.flush()
        time.sleep(min(HEARTBEAT_S, max(PAUSE_S, (time.monotonic() - began) / SHARE)))


def main() -> None:
    """Entry of the process."""
    # The terminal's interrupt is for the engine, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a predictor prints must not get between the messages.
    sink = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(int(sys.argv[1]), sys.stdin.fileno(), sink)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
