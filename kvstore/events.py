"""What happened in a store, so that a scheduler's catalogue can follow it. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import UnavailableReason
from kvstore.key import ChunkKey
from kvstore.tiers import Tier

logger = logging.getLogger(__name__)


class Published(NamedTuple):
    """The chunk can now be served from this tier: `nbytes` of KV, `tokens` rows."""

    key: ChunkKey
    tier: Tier
    nbytes: int
    tokens: int


class Evicted(NamedTuple):
    """The chunk can no longer be served from this tier, whoever removed it; `nbytes` of KV left."""

    key: ChunkKey
    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A damaged file was set aside. The `Evicted` event of the disk tier is sent as well."""

    key: ChunkKey
    reason: UnavailableReason
    detail: str


@dataclass(frozen=True, slots=True)
class NotStored:
    """The disk did not take a chunk that was put: it is full or cannot be written."""

    key: ChunkKey
    reason: UnavailableReason


StoreEvent = Published | Evicted | Quarantined | NotStored
Listener = Callable[[StoreEvent], None]


class EventQueue:
    """Delivers events in the order they were queued, one at a time, without holding any caller's lock.

    A thread that finds another one delivering leaves its events to it, so a listener may take locks of its
    own and may call the store. A listener that raises is logged and keeps its subscription.
    """

    def __init__(self) -> None:
        self._events: deque[StoreEvent] = deque()
        self._listeners: list[Listener] = []
        self._delivering = threading.Lock()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add a listener; the returned function removes it again."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def queue(self, event: StoreEvent) -> None:
        """Remember an event; call it under the lock that orders the changes."""
        self._events.append(event)

    def deliver(self) -> None:
        """Hand every queued event to every listener; call it with no lock held."""
        # The outer loop sees events queued by a thread that gave up while this one was about to let go.
        while self._events and self._delivering.acquire(blocking=False):
            try:
                while self._events:
                    self._deliver_one(self._events.popleft())
            finally:
                self._delivering.release()

    def _deliver_one(self, event: StoreEvent) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %s", event)
