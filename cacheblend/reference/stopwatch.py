"""Wall time by part of a prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums wall time by named part; time inside a nested part counts for that part only.

    Args:
        device: on an accelerator, parts end when the device has finished its work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nested: list[float] = []
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block as part `name`."""
        start = time.perf_counter()
        self._nested.append(0.0)
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            elapsed = (time.perf_counter() - start) * 1e3
            own = elapsed - self._nested.pop()
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + own
            if self._nested:
                self._nested[-1] += elapsed
