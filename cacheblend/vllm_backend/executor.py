"""Blends that wait and the one that runs, a share of it a step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from cacheblend.plan import BlendPlan
from cacheblend.selectors.base import Evidence
from cacheblend.vllm_backend.blend import BlendBatch
from cacheblend.vllm_backend.forward import LayersForward
from cacheblend.vllm_backend.messages import BlendDone, BlendOrder, BlendTimes
from cacheblend.vllm_backend.ranks import Ranks
from kvstore.store import ChunkStore

logger = logging.getLogger(__name__)

PLACED_PER_BATCH = 4
"""Rows of stored KV that one batch moves, in multiples of the rows of a forward pass: bounds the staging buffers."""


@dataclass
class Progress:
    """What a step brought: blends that ended well, and those that raised, with the error's name.

    What was told done is all asked of the device, which may still be at it: what is asked of it next comes after.
    """

    done: dict[str, BlendDone] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class BlendExecutor:
    """Carries out orders in the order they came. Orders that wait together are blended together.

    Args:
        forward: runs the model.
        store: where chunks come from.
        ranks: the tensor-parallel ranks that do the same.
        most_rows: of one forward pass.
        rows_per_step: rows after which a step leaves the rest to the next one.
    """

    def __init__(
        self,
        forward: LayersForward,
        store: ChunkStore,
        ranks: Ranks,
        most_rows: int,
        rows_per_step: int,
    ) -> None:
        self._forward = forward
        self._store = store
        self._ranks = ranks
        self._most_rows = min(most_rows, rows_per_step)
        self._rows_per_step = rows_per_step
        self._most_placed = workspace_rows(most_rows, rows_per_step)
        self._waiting: deque[BlendOrder] = deque()
        self._batch: BlendBatch | None = None
        self._pieces: Iterator[float] = iter(())
        self._at_the_device: list[BlendBatch] = []

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return self._batch is not None or bool(self._waiting)

    def submit(self, order: BlendOrder) -> None:
        """Queue an order."""
        self._waiting.append(order)

    def cancel(self, request_id: str) -> bool:
        """Drop an order that has not begun; one that runs is finished with its batch.

        Returns:
            Whether it was dropped; nothing will be reported for it.
        """
        kept = deque(order for order in self._waiting if order.request_id != request_id)
        dropped = len(kept) < len(self._waiting)
        self._waiting = kept
        return dropped

    def take_times(self, wait: bool = False) -> dict[str, BlendTimes]:
        """How long the blends took that the device has finished since the last call; their chunks are let go.

        Args:
            wait: for the device, so that none is left.
        """
        times: dict[str, BlendTimes] = {}
        waiting: list[BlendBatch] = []
        for batch in self._at_the_device:
            taken = batch.times(wait)
            if taken is None:
                waiting.append(batch)
            else:
                times.update(taken)
        self._at_the_device = waiting
        return times

    @torch.inference_mode()
    def advance(self) -> Progress:
        """Work until the step's rows are used up or nothing is left."""
        progress = Progress()
        spent = 0.0
        while spent < self._rows_per_step and self.busy:
            if self._batch is None:
                self._begin(self._take_batch())
            spent += self._next_piece(progress)
        return progress

    def _next_piece(self, progress: Progress) -> float:
        batch = self._batch
        assert batch is not None
        try:
            return next(self._pieces)
        except StopIteration:
            progress.done.update(batch.done)
            self._at_the_device.append(batch)
        except Exception as error:
            if self._ranks.shard.size > 1:
                # The other ranks may wait for this one in the middle of the pass: an end is better than that.
                raise
            self._give_up(batch, error, progress)
        self._batch = None
        return 0.0

    def _give_up(self, batch: BlendBatch, error: Exception, progress: Progress) -> None:
        """One that fails alone has failed; of several, each is tried alone, so that only the culprit does."""
        logger.exception("blending %d requests failed", len(batch.orders), exc_info=error)
        if len(batch.orders) == 1:
            progress.failed[batch.orders[0].request_id] = type(error).__name__
            return
        for order in batch.orders:
            alone = self._make_batch([order])
            try:
                for _ in alone.pieces():
                    pass
                progress.done.update(alone.done)
                self._at_the_device.append(alone)
            except Exception as own_error:
                logger.exception("blending request %s failed", order.request_id)
                progress.failed[order.request_id] = type(own_error).__name__

    def _begin(self, orders: Sequence[BlendOrder]) -> None:
        self._batch = self._make_batch(orders)
        self._pieces = self._batch.pieces()

    def _make_batch(self, orders: Sequence[BlendOrder]) -> BlendBatch:
        return BlendBatch(orders, self._forward, self._store, self._ranks, self._most_rows)

    def _take_batch(self) -> list[BlendOrder]:
        """The next orders that fit one batch: at least one, by the rows they compute and the rows they move."""
        orders: list[BlendOrder] = []
        computed = placed = 0
        while self._waiting:
            order = self._waiting[0]
            computed += rows_computed(order)
            placed += rows_placed(order)
            too_much = computed > self._rows_per_step or placed > self._most_placed
            if orders and too_much:
                break
            orders.append(self._waiting.popleft())
        return orders


def workspace_rows(most_rows: int, rows_per_step: int) -> int:
    """Rows of stored KV that one batch moves at most, but for a single request that is larger."""
    return PLACED_PER_BATCH * min(most_rows, rows_per_step)


def rows_computed(order: BlendOrder) -> int:
    """Rows that an order will push through its first layer, estimated before any evidence is seen."""
    plan: BlendPlan = order.plan
    fresh = sum(span.length for span in plan.spans[:-1] if not span.segment.reused)
    if plan.selector is None or not plan.reused:
        return fresh
    if plan.selector.needs(Evidence.DEVIATION):
        return fresh + plan.reused_tokens
    expected = fresh + plan.selector.expected_rows([span.length for span in plan.reused])
    if plan.selector.needs(Evidence.ATTENTION):
        expected += fresh + plan.question.length
    return expected


def rows_placed(order: BlendOrder) -> int:
    """Rows of stored KV that an order moves, where none of them is in the prefix cache."""
    return order.plan.reused_tokens if order.plan.chunks_read else 0
