"""Messages between an engine and its predictor's process: pickled, each behind its length. Imports no torch."""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import dataclass, field
from typing import Any

from cacheblend.protocols import PredictorEvent

READ_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """A predictor that another process makes for itself.

    Attributes:
        target: `module:name` of what makes it, a class for instance.
        arguments: keyword arguments for it; they are pickled.
    """

    target: str = "cacheblend.scheduling.session_predictor:SessionPredictor"
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Engine to predictor: events in order. Their chunks are stand-ins whose one token id is a number."""

    events: tuple[PredictorEvent, ...]


@dataclass(frozen=True, slots=True)
class AdviceChange:
    """Predictor to engine: what is new or has changed; it says as well that the process lives.

    Attributes:
        said_at: `time.monotonic()` of the machine, seconds.
        pieces: numbers of chunks with confidence, most confident first; 0 takes back what was said before.
    """

    said_at: float
    pieces: tuple[tuple[int, float], ...] = ()


class FrameWriter:
    """Writes messages to a non-blocking file descriptor as far as it takes them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left = bytearray()

    @property
    def busy(self) -> bool:
        """Whether a part of an earlier message is still to be written."""
        return bool(self._left)

    def put(self, message: object) -> None:
        """Take a message; whoever looks at `busy` first holds one at a time."""
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._left += _LENGTH.pack(len(payload)) + payload

    def flush(self) -> None:
        """Write what can be written now; never blocks.

        Raises:
            OSError: the other side is gone.
        """
        try:
            while self._left:
                del self._left[: os.write(self._descriptor, self._left)]
        except BlockingIOError:
            return


class FrameReader:
    """Reads messages from a non-blocking file descriptor as far as they have come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._bytes = bytearray()
        self.ended = False

    def messages(self) -> list[Any]:
        """The messages that are complete; never blocks. `ended` tells that the other side is gone."""
        self._read()
        found = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            found.append(pickle.loads(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return found

    def _read(self) -> None:
        try:
            while piece := os.read(self._descriptor, READ_BYTES):
                self._bytes += piece
                if len(piece) < READ_BYTES:
                    return
            self.ended = True
        except BlockingIOError:
            return
        except OSError:
            self.ended = True
