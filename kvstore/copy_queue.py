"""Copies of chunks in slices, so that one can be called off half-way and the device is never far behind."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvstore.chunk import ChunkKV
from kvstore.copy_lane import CopyLane, Mark
from kvstore.pacing import Pace


@dataclass(slots=True, eq=False)
class ChunkCopy:
    """One chunk on its way into a tensor.

    Attributes:
        source: the chunk; it stays where it is until the copy is over.
        destination: a tensor of the shape and dtype of the chunk's KV; not to be read before the copy is over.
        stopped: no further slice is to be issued.
    """

    source: ChunkKV
    destination: torch.Tensor
    stopped: bool = False
    _begun: Mark | None = field(default=None, init=False)
    _last: Mark | None = field(default=None, init=False)
    _layers: int = field(init=False)
    _layer_bytes: int = field(init=False)
    _next_layer: int = field(default=0, init=False)
    _outstanding: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # Once: asking a tensor costs as much as the rest of a look at the queue.
        self._layers = len(self.source.kv)
        self._layer_bytes = self.source.nbytes // self._layers

    @property
    def all_issued(self) -> bool:
        """Whether the device has been asked for the whole chunk."""
        return self._next_layer == self._layers

    @property
    def is_over(self) -> bool:
        """Whether nothing writes to the destination any more, nor will."""
        return not self._outstanding and (self.stopped or self.all_issued)

    @property
    def seconds(self) -> float:
        """Seconds between the device's beginning of the first slice and its end of the last; once it is over."""
        return self._last.seconds_since(self._begun) if self._last and self._begun else 0.0


class _Slice(NamedTuple):
    """A part of a copy that the device has been asked for, and where it lies in the lane's order."""

    copy: ChunkCopy
    begin: Mark
    end: Mark
    nbytes: int


class CopyQueue:
    """Issues copies to a lane in order, slice by slice, and says which are over. Never waits. Not thread-safe.

    Args:
        lane: where copies run.
        bytes_ahead: bytes asked of the lane and not known to be done, at most; one slice is always allowed.
        slice_bytes: bytes of a slice, rounded down to whole layers; one layer at least.
        pace: of all copies.

    Attributes:
        paused: whether no slice is issued; what was issued before ends as ever.
    """

    def __init__(self, lane: CopyLane, bytes_ahead: int, slice_bytes: int, pace: Pace):
        self._lane = lane
        self._pace = pace
        self._bytes_ahead = bytes_ahead
        self._slice_bytes = slice_bytes
        self._unissued: deque[ChunkCopy] = deque()
        self._issued: deque[_Slice] = deque()
        self._over: dict[ChunkCopy, None] = {}
        self._ahead = 0
        self._goes_on: Mark | None = None
        self.paused = False

    @property
    def bytes_issued(self) -> int:
        """Bytes asked of the lane and not known to be done."""
        return self._ahead

    @property
    def wants_more(self) -> bool:
        """Whether everything added has been issued and more would be issued at once."""
        return not self.paused and not self._unissued and self._ahead < self._bytes_ahead

    def follow_caller(self) -> None:
        """See `CopyLane.follow_caller`; what is waited for there is no part of the next slice."""
        self._lane.follow_caller()
        self._goes_on = self._lane.mark()

    def add(self, copy: ChunkCopy) -> None:
        """Issue a copy as far as there is room, the rest in later `advance`."""
        self._unissued.append(copy)
        self._issue()

    def stop(self, copy: ChunkCopy) -> None:
        """Issue no more of a copy; it is over once what was issued is done."""
        copy.stopped = True
        if copy in self._unissued:
            self._unissued.remove(copy)
        self._note_if_over(copy)

    def resume(self, copy: ChunkCopy) -> None:
        """Go on with a copy that was stopped and has not been handed out by `advance`."""
        copy.stopped = False
        self._over.pop(copy, None)
        if not copy.all_issued:
            self.add(copy)
        self._note_if_over(copy)

    def advance(self) -> list[ChunkCopy]:
        """See what is done, issue what there is room for, and hand out the copies that are over."""
        while self._issued and self._issued[0].end.passed():
            done = self._issued.popleft()
            self._ahead -= done.nbytes
            self._pace.learn(done.nbytes, done.end.seconds_since(done.begin))
            done.copy._outstanding -= 1
            self._note_if_over(done.copy)
        self._issue()
        over = list(self._over)
        self._over.clear()
        return over

    def _note_if_over(self, copy: ChunkCopy) -> None:
        if copy.is_over:
            self._over[copy] = None

    def _issue(self) -> None:
        while self._unissued and not self.paused:
            copy = self._unissued[0]
            layers = min(max(self._slice_bytes // copy._layer_bytes, 1), copy._layers - copy._next_layer)
            nbytes = layers * copy._layer_bytes
            if self._ahead and self._ahead + nbytes > self._bytes_ahead:
                return
            if self._pace.holds_back(self._bytes_ahead):
                return
            self._issue_slice(copy, layers, nbytes)
            if copy.all_issued:
                self._unissued.popleft()

    def _issue_slice(self, copy: ChunkCopy, layers: int, nbytes: int) -> None:
        first, end = copy._next_layer, copy._next_layer + layers
        # Behind a copy that is under way it begins when that one ends.
        begin = self._goes_on or (self._issued[-1].end if self._issued else self._lane.mark())
        self._goes_on = None
        if layers == copy._layers:
            self._lane.copy(copy.destination, copy.source.kv)
        else:
            self._lane.copy(copy.destination[first:end], copy.source.kv[first:end])
        copy._begun, copy._last = copy._begun or begin, self._lane.mark()
        self._issued.append(_Slice(copy, begin, copy._last, nbytes))
        self._pace.note(nbytes)
        self._ahead += nbytes
        copy._next_layer = end
        copy._outstanding += 1
