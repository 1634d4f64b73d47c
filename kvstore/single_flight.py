"""One computation for a missing chunk, however many ask for it at once. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from kvstore.errors import StoreError
from kvstore.key import ChunkKey


class SingleFlight:
    """Divides keys among the askers of one process, so that each key is computed by one of them.

    Args:
        is_done: whether a key needs no computing any more. Asked under the same lock under which claims are
            made and ended, so an asker that comes just after a computation sees its result. It must not
            claim.
    """

    def __init__(self, is_done: Callable[[ChunkKey], bool]):
        self._is_done = is_done
        self._changed = threading.Condition()
        self._claimed: set[ChunkKey] = set()

    def claim(self, keys: Sequence[ChunkKey]) -> Claim:
        """Claim those keys that are neither done nor being computed; never blocks."""
        return Claim(self, keys)

    def _take(self, keys: set[ChunkKey]) -> tuple[set[ChunkKey], set[ChunkKey]]:
        """Under the lock: take what is free, and say what others are computing."""
        wanted = {key for key in keys if not self._is_done(key)}
        theirs = wanted & self._claimed
        mine = wanted - theirs
        self._claimed |= mine
        return mine, theirs


class Claim:
    """One asker's part of the work.

        with flight.claim(keys) as claim:
            compute(claim.mine)
            while taken_over := claim.wait():
                compute(taken_over)

    Leaving the block, or calling `wait`, says that what was claimed has been computed. Leaving it by an
    exception gives it back, and an asker that waits for it takes over. Claims must not be nested in one
    thread.
    """

    def __init__(self, flight: SingleFlight, keys: Sequence[ChunkKey]):
        self._flight = flight
        self._order = list(dict.fromkeys(keys))
        with flight._changed:
            self._mine, self._theirs = flight._take(set(self._order))
        self._ended = False

    @property
    def mine(self) -> tuple[ChunkKey, ...]:
        """Keys this asker must compute now, in the order they were asked for."""
        return self._ordered(self._mine)

    def wait(self) -> tuple[ChunkKey, ...]:
        """Give back what this asker computed, then block until the others have done theirs.

        Returns:
            Keys whose computation failed elsewhere and that are this asker's now; empty when all are done.

        Raises:
            StoreError: the claim has ended.
        """
        if self._ended:
            raise StoreError("This claim has ended; wait inside its with block.")
        flight = self._flight
        with flight._changed:
            self._give_back()
            while self._theirs:
                self._mine, self._theirs = flight._take(self._theirs)
                if self._mine or not self._theirs:
                    break
                flight._changed.wait()
        return self.mine

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        with self._flight._changed:
            self._give_back()

    def _give_back(self) -> None:
        # Whether it was computed or has failed is for `is_done` to say, when the next asker takes it.
        self._flight._claimed -= self._mine
        self._mine = set()
        self._flight._changed.notify_all()

    def _ordered(self, keys: set[ChunkKey]) -> tuple[ChunkKey, ...]:
        return tuple(key for key in self._order if key in keys)
