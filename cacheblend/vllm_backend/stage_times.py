"""How long the stages of a blend take on the device they run on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimes:
    """Adds up stages; a stage inside another counts for itself alone.

    Args:
        device: on a GPU, times lie between events and are read once, at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open: list[str] = []
        self._marks: list[tuple[str | None, float | torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as `name`."""
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    @property
    def finished(self) -> bool:
        """Whether the device has done the work of all stages so far."""
        if not self._on_gpu or not self._marks:
            return True
        last = self._marks[-1][1]
        assert isinstance(last, torch.cuda.Event)
        return last.query()

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds by stage; on a GPU, waits until its work is done."""
        totals: dict[str, float] = {}
        if self._on_gpu and self._marks:
            last = self._marks[-1][1]
            assert isinstance(last, torch.cuda.Event)
            last.synchronize()
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                totals[name] = totals.get(name, 0.0) + _between(start, end)
        return totals

    def _mark(self) -> None:
        """From here on the innermost open stage is timed."""
        now: float | torch.cuda.Event = time.perf_counter()
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((self._open[-1] if self._open else None, now))


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end))
    assert not isinstance(start, torch.cuda.Event)
    assert not isinstance(end, torch.cuda.Event)
    return (end - start) * 1e3
