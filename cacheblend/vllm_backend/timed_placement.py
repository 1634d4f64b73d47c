"""A placement as a blend uses it: waits for it are timed, and it goes on while the host waits for the device."""

from __future__ import annotations

import time

import torch

from cacheblend.vllm_backend.placement import LayerPlacement
from cacheblend.vllm_backend.stage_times import StageTimes

LOOK_AGAIN_S = 5e-5
"""Pause between two looks whether the device is done; a group of layers is on the link for a millisecond or two."""


class TimedPlacement:
    """How stored KV gets into the pages; what the model's stream waits for counts as a stage of its own.

    Args:
        placement: what brings it there.
        times: of the blend.
    """

    def __init__(self, placement: LayerPlacement, times: StageTimes) -> None:
        self._placement = placement
        self._times = times

    def ensure(self, layer: int) -> None:
        """See `LayerPlacement.ensure`."""
        if self._placement.is_due(layer):
            with self._times.stage("relocate"):
                self._placement.ensure(layer)

    def fetch(self, found: torch.Tensor, before: torch.cuda.Event | None) -> torch.Tensor:
        """`found` on the host. While the device is not at `before` (of `mark`) yet, chunks go on coming."""
        if before is None:
            return found.cpu()
        host = torch.empty_like(found, device="cpu", pin_memory=True)
        host.copy_(found, non_blocking=True)
        there = _recorded()
        while not there.query():
            if not before.query():
                self._placement.advance()
            time.sleep(LOOK_AGAIN_S)
        return host

    def end(self) -> None:
        """See `LayerPlacement.end`."""
        self._placement.end()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What the current stream has been asked for so far; None where `device` has no streams."""
    return _recorded() if device.type == "cuda" else None


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
