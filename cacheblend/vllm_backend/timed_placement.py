"""A placement as a blend uses it: waits for it are timed."""

from __future__ import annotations

from cacheblend.vllm_backend.placement import LayerPlacement
from cacheblend.vllm_backend.stage_times import StageTimes


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

    def start_all(self) -> None:
        """See `LayerPlacement.start_all`."""
        self._placement.start_all()

    def end(self) -> None:
        """See `LayerPlacement.end`."""
        self._placement.end()
