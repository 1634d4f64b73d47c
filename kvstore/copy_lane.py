"""Copies that run behind the back of whoever asks for them, one after another."""

from __future__ import annotations

from typing import Protocol

import torch

from kvstore.copy_turns import CopyTurns
from kvstore.cuda_runtime import copies_to_device


class Mark(Protocol):
    """A place in the lane's order of work."""

    def passed(self) -> bool:
        """Whether everything asked for before the mark is done; returns at once."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds the lane took from `earlier` to here, once this mark has passed."""
        ...


class CopyLane(Protocol):
    """One order of work, apart from everyone else's. No call waits for work to be done."""

    def enter_thread(self) -> None:
        """A thread of its owner's own calls this before any other call."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Ask for a copy between tensors of one shape and dtype, both contiguous; they must live until it is done."""
        ...

    def follow_caller(self) -> None:
        """Have what is asked for from now on come behind what the caller has asked of the device elsewhere so far."""
        ...

    def mark(self) -> Mark:
        """A mark behind everything asked for so far."""
        ...


class CudaLane:
    """Copies on a CUDA stream of their own.

    Args:
        device: a CUDA device.

    Attributes:
        stream: the stream. Who reuses memory that this lane filled lets their own stream wait for it.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._turns = CopyTurns(self.stream)

    def enter_thread(self) -> None:
        """See `CopyLane.enter_thread`: a new thread's device is the first one, whichever the process works on."""
        torch.cuda.set_device(self.stream.device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `CopyLane.copy`; the source must be page-locked, or the copy is waited for."""
        ask = copies_to_device() if source.is_pinned() else None
        if ask is None:
            with torch.cuda.stream(self.stream):
                destination.copy_(source, non_blocking=True)
            return
        to, origin = destination.data_ptr(), source.data_ptr()
        # Two parts of one copy are never of one turn.
        for (part,) in self._turns.of([source.nbytes]):
            ask([to + part.first], [origin + part.first], [part.nbytes], self.stream.cuda_stream)

    def follow_caller(self) -> None:
        """See `CopyLane.follow_caller`: behind the caller's current stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def mark(self) -> Mark:
        """See `CopyLane.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return _CudaMark(event)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def passed(self) -> bool:
        return self._event.query()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return earlier._event.elapsed_time(self._event) / 1e3
