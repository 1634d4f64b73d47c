"""The blend of several prompts at once, in pieces.

Up to three stages, as in the reference runner:

1. load: stored KV is taken from the store; a chunk that cannot be had becomes fresh rows of the same plan. A prompt
   whose selector recomputes everything takes none, and so it can lack none.
2. score (selectors that need attention): fresh rows and the question run over plain reuse, and the question's
   attention is tallied.
3. recompute: chosen rows and fresh rows run through every layer; `deviation` narrows them at its check layers
   (arXiv:2405.16444, figure 9).

The question is left to the engine. `BlendBatch.pieces` is a generator that yields after every forward pass, so that
the caller can spread a large blend over several engine steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import numpy as np
import torch

from cacheblend.kernels.kv_deviation import kv_deviation, squared_distance
from cacheblend.plan import BlendPlan
from cacheblend.protocols import BlendReport
from cacheblend.reports import note_blend
from cacheblend.selectors.base import Candidates, Evidence
from cacheblend.selectors.query import first_tallied_layer
from cacheblend.selectors.selection import RowSelection
from cacheblend.vllm_backend.drift import DriftingPrompt, PassDrift
from cacheblend.vllm_backend.forward import LayersForward
from cacheblend.vllm_backend.hidden import Entering, Hidden
from cacheblend.vllm_backend.messages import BlendDone, BlendOrder, BlendTimes
from cacheblend.vllm_backend.placement import PlacedSpan, place_layers
from cacheblend.vllm_backend.ranks import Ranks
from cacheblend.vllm_backend.rows import PromptPages, PromptRows, RowBatch, slices
from cacheblend.vllm_backend.scoring import QuestionTally, ScoringAttention
from cacheblend.vllm_backend.stage_times import StageTimes
from cacheblend.vllm_backend.timed_placement import TimedPlacement
from kvstore.chunk import ChunkKV
from kvstore.errors import ChunkUnavailable, UnavailableReason
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.store import ChunkStore

logger = logging.getLogger(__name__)


@dataclass
class _Prompt:
    """One order while it is blended."""

    order: BlendOrder
    pages: PromptPages
    plan: BlendPlan
    chunks: list[ChunkKV | None]
    unavailable: dict[ChunkKey, str]
    bytes_loaded: dict[str, int]
    selection: RowSelection | None = None
    rows: PromptRows | None = None
    tally: QuestionTally | None = None

    def fresh(self) -> torch.Tensor:
        """[n] int64 fresh rows that are still to be computed."""
        ranges = [
            np.arange(max(span.start, self.order.start), min(span.end, self.order.end))
            for span in self.plan.spans[:-1]
            if not span.segment.reused and span.end > self.order.start and span.start < self.order.end
        ]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *ranges]))

    def placed(self) -> list[PlacedSpan]:
        """The reused spans, those in the pages already left out."""
        start = self.order.start
        return [
            PlacedSpan(self.pages, span, max(span.start, start), chunk)
            for span, chunk in zip(self.plan.reused, self.chunks, strict=True)
            if span.end > start and chunk is not None
        ]

    @property
    def positions(self) -> torch.Tensor:
        """[n] int64 ascending, the rows that are computed."""
        assert self.rows is not None
        return self.rows.positions

    @property
    def carries_drift(self) -> bool:
        """Whether rows left alone move with those that are recomputed."""
        return self.plan.moves_rows and self.selection is not None

    def drifting(self) -> DriftingPrompt:
        """What moves with the rows chosen so far."""
        assert self.selection is not None
        stored = {s.start: chunk for s, chunk in zip(self.plan.reused, self.chunks, strict=True) if chunk is not None}
        return DriftingPrompt(self.plan, self.pages, self.selection.chosen, self.order.start, stored)

    def needs_deviation_at(self, layer: int) -> bool:
        """Whether the rows that it drops at `layer` depend on how far their KV deviates there."""
        return self.selection is not None and self.selection.needs_deviation_at(layer)

    @property
    def needs_scores(self) -> bool:
        """Whether the question has to be asked what it attends to."""
        selector = self.plan.selector
        return bool(self.plan.reused) and selector is not None and selector.needs(Evidence.ATTENTION)


@dataclass
class BlendBatch:
    """Blends the orders together.

    Args:
        orders: at least one.
        forward: runs the model.
        store: where chunks come from.
        ranks: the tensor-parallel ranks that do the same.
        most_rows: of one forward pass.
    """

    orders: Sequence[BlendOrder]
    forward: LayersForward
    store: ChunkStore
    ranks: Ranks
    most_rows: int
    done: dict[str, BlendDone] = field(default_factory=dict)
    _times: StageTimes | None = field(default=None, init=False)
    _in_use: list[ChunkKV | None] = field(default_factory=list, init=False)
    _last_rows: RowBatch | None = field(default=None, init=False)

    def pieces(self) -> Iterator[float]:
        """Do it, piece by piece; when it ends, `done` has each order's account.

        Yields:
            After each forward pass, its rows times the share of the layers they went through.
        """
        times = StageTimes(self.forward.device)
        with times.stage("load"):
            prompts = [self._load(order) for order in self.orders]
            spans = [span for prompt in prompts for span in prompt.placed()]
            placing = TimedPlacement(place_layers(spans, self.forward), times)
        try:
            yield from self._fill(prompts, placing, times)
        finally:
            placing.end()
        self.done = {p.order.request_id: _account(p) for p in prompts}
        self._times = times
        # Copies and kernels that are queued may still read them.
        self._in_use = [chunk for prompt in prompts for chunk in prompt.chunks]

    def _fill(self, prompts: Sequence[_Prompt], placing: TimedPlacement, times: StageTimes) -> Iterator[float]:
        """Fill the pages of all prompts."""
        asking = [prompt for prompt in prompts if prompt.needs_scores]
        if asking:
            yield from self._score(asking, placing, times)
        yield from self._recompute(prompts, placing, times)
        # A prompt that computes no row still gets its stored KV.
        placing.ensure(self.forward.num_layers - 1)

    def times(self, wait: bool = False) -> dict[str, BlendTimes] | None:
        """How long each order took, once `pieces` has ended and the device has finished; None before.

        Until then the batch is to be kept, and with it the chunks that it reads.

        Args:
            wait: for the device.
        """
        if self._times is None or not (wait or self._times.finished):
            return None
        taken = BlendTimes(self._times.milliseconds(), len(self.orders))
        return {order.request_id: taken for order in self.orders}

    def _load(self, order: BlendOrder) -> _Prompt:
        needed = {s.segment.identity.key: s for s in order.plan.reused if s.segment.identity and s.end > order.start}
        found: dict[ChunkKey, ChunkKV] = {}
        reasons: dict[ChunkKey, str] = {}
        bytes_loaded: dict[str, int] = {}
        for identity in order.plan.chunks_read:
            if identity.key not in needed:
                continue
            try:
                tier, chunk = self._get(identity)
            except Exception as gone:
                # Whatever it was: the other ranks wait to agree on it.
                reasons[identity.key] = _reason(gone)
                continue
            found[identity.key] = chunk
            bytes_loaded[tier] = bytes_loaded.get(tier, 0) + chunk.nbytes
        reasons = self.ranks.agree(reasons)
        for key, reason in reasons.items():
            logger.warning("chunk %s is prefilled as fresh rows: %s", key[:12], reason)
        self._require_whole(order, reasons)
        plan = order.plan.with_fresh(reasons)
        pages = PromptPages.of(order.plan.token_ids, order.block_ids, self.forward.block_size)
        return _Prompt(order, pages, plan, [found.get(key) for key in plan.keys], reasons, bytes_loaded)

    @staticmethod
    def _require_whole(order: BlendOrder, reasons: Mapping[ChunkKey, str]) -> None:
        """Refuse, on all ranks alike, to compute the rest of a prompt whose beginning holds a chunk that is gone."""
        for span in order.plan.reused:
            identity = span.segment.identity
            if identity is not None and identity.key in reasons and span.start < order.start:
                raise ChunkUnavailable(
                    identity.key, UnavailableReason(reasons[identity.key]), "part of it is in the prefix cache already"
                )

    def _get(self, identity: ChunkIdentity) -> tuple[str, ChunkKV]:
        chunk, tier = self.store.fetch(identity)
        if chunk.kv.dtype != self.forward.dtype:
            raise ChunkUnavailable(identity.key, UnavailableReason.OTHER_MODEL, f"its KV is {chunk.kv.dtype}")
        return tier.value, chunk

    def _score(self, prompts: Sequence[_Prompt], placing: TimedPlacement, times: StageTimes) -> Iterator[float]:
        """Tally the attention that each question pays to the rows before it."""
        parts = []
        for prompt in prompts:
            question = prompt.plan.question
            heads, device = self.forward.kv_heads, self.forward.device
            prompt.tally = QuestionTally(prompt.pages, question.start, question.end, heads, device)
            positions = torch.cat([prompt.fresh(), torch.arange(question.start, question.end)])
            parts.append(PromptRows(prompt.pages, positions, positions < question.start))
        for piece in slices(parts, self.most_rows):
            rows = RowBatch([part for _, part in piece], self.forward.device)
            members = [prompts[index] for index, _ in piece]
            tallies = [prompt.tally for prompt in members if prompt.tally is not None]
            with times.stage("score"):
                if len(piece) > 1 or not self.forward.score_few(piece[0][1], tallies[0], placing.ensure):
                    attention = ScoringAttention(rows, tallies, first_tallied_layer(self.forward.num_layers))
                    hidden = self.forward.embed(rows)
                    self.forward.run(
                        0, self.forward.num_layers, hidden, rows, attention, placing.ensure, attend_last=True
                    )
            yield len(rows)

    def _recompute(self, prompts: Sequence[_Prompt], placing: TimedPlacement, times: StageTimes) -> Iterator[float]:
        """Run chosen and fresh rows through every layer, narrowing on the way."""
        layers = self.forward.num_layers
        for prompt in prompts:
            self._choose(prompt)
        choosing = [prompt.selection for prompt in prompts if prompt.selection is not None]
        drops = sorted({layer for selection in choosing for layer in selection.drop_layers})
        hidden: Hidden | None = None
        going_on = np.empty(0, dtype=np.int64)
        for first, last in zip([0, *drops], [*drops, layers], strict=True):
            if first in drops and hidden is not None:
                placing.ensure(first)
                with times.stage("score"):
                    going_on = self._narrow(first, hidden, prompts, placing)
            for selection in choosing:
                selection.count_layers(last - first)
            kept: list[Hidden] = []
            done = 0
            drifting = {i: prompt.drifting() for i, prompt in enumerate(prompts) if prompt.carries_drift}
            together = {i: one.together(prompts[i].positions) for i, one in drifting.items()}
            # What moves by itself does so with the first pass, or after all where there is none.
            alone = list(drifting.values())
            for piece in slices(_rows(prompts), self.most_rows, together):
                rows = self._batch([part for _, part in piece])
                entering = None if hidden is None else Entering(hidden, going_on[done : done + len(rows)])
                with times.stage("recompute"):
                    drift = self._drift(drifting, piece, alone)
                    alone_rows = (first, entering, piece[0][1], drift, placing.ensure)
                    if last < layers or len(piece) > 1 or not self.forward.recompute_alone(*alone_rows):
                        kept.append(self._run(range(first, last), rows, entering, placing, drift))
                alone = []
                done += len(rows)
                yield len(rows) * (last - first) / layers
            if alone:
                self._move_alone(range(first, last), alone, placing)
            hidden = Hidden.join(kept) if kept and last < layers else None

    def _batch(self, parts: Sequence[PromptRows]) -> RowBatch:
        """These rows; those of the last pass are on the device already."""
        last = self._last_rows
        if last is None or tuple(parts) != last.parts:
            last = self._last_rows = RowBatch(parts, self.forward.device)
        return last

    def _run(
        self,
        layers: range,
        rows: RowBatch,
        entering: Entering | None,
        placing: TimedPlacement,
        drift: PassDrift | None,
    ) -> Hidden:
        """One pass, layer by layer; `entering` enters the first of `layers`, None before the model's first."""
        hidden = self.forward.embed(rows) if entering is None else entering.on(self.forward.device)
        attention = self.forward.attention(rows)
        return self.forward.run(layers.start, layers.stop, hidden, rows, attention, placing.ensure, drift=drift)

    def _drift(
        self,
        drifting: Mapping[int, DriftingPrompt],
        piece: Sequence[tuple[int, PromptRows]],
        alone: Sequence[DriftingPrompt],
    ) -> PassDrift | None:
        """What moves with a pass; None if nothing does."""
        if not drifting:
            return None
        firsts = accumulate((len(part.positions) for _, part in piece), initial=0)
        parts = [(drifting[i], part, at) for (i, part), at in zip(piece, firsts, strict=False) if i in drifting]
        drift = PassDrift(parts, alone, self.forward.rotary, self.forward.device)
        return None if drift.moves_nothing else drift

    def _move_alone(self, layers: range, alone: Sequence[DriftingPrompt], placing: TimedPlacement) -> None:
        """Move what no pass has a row of."""
        drift = PassDrift([], alone, self.forward.rotary, self.forward.device)
        nothing = torch.empty(0, self.forward.kv_heads, self.forward.head_dim, device=self.forward.device)
        for layer in () if drift.moves_nothing else layers:
            placing.ensure(layer)
            drift.apply(layer, self.forward.pages[layer], nothing, nothing)

    def _choose(self, prompt: _Prompt) -> None:
        fresh = prompt.fresh()
        if prompt.plan.reused:
            attention = None
            # While the device is still at what the choice waits for.
            candidates = Candidates.of_plan(prompt.plan)
            if prompt.tally is not None:
                prompt.pages.make_tables()
                attention = self.ranks.sum(prompt.tally.mass.sum(0)).cpu()
                # The scoring pass has computed the rows before the first reused one for good.
                fresh = fresh[fresh > prompt.plan.reused[0].start]
            prompt.selection = RowSelection(
                prompt.plan,
                self.forward.num_layers,
                torch.device("cpu"),
                fresh,
                attention,
                prompt.order.start,
                candidates,
            )
            prompt.rows = PromptRows(prompt.pages, prompt.selection.positions)
        else:
            prompt.rows = PromptRows(prompt.pages, fresh)

    def _narrow(self, layer: int, hidden: Hidden, prompts: Sequence[_Prompt], placing: TimedPlacement) -> np.ndarray:
        """Drop the rows whose KV at `layer` deviates least from what is in the pages.

        Returns:
            [rows] int64, which rows of `hidden` go on.
        """
        deviations = self._deviations(layer, hidden, prompts, placing)
        kept = []
        for prompt in prompts:
            if prompt.selection is not None and prompt.selection.drops_at(layer):
                keep = prompt.selection.narrow(layer, deviations.get(prompt.order.request_id)).numpy()
                prompt.rows = PromptRows(prompt.pages, prompt.selection.positions)
            else:
                keep = np.ones(len(prompt.positions), dtype=bool)
            kept.append(keep)
        return np.flatnonzero(np.concatenate(kept))

    def _deviations(
        self, layer: int, hidden: Hidden, prompts: Sequence[_Prompt], placing: TimedPlacement
    ) -> dict[str, torch.Tensor]:
        """Squared difference of new and stored KV, over all heads of all ranks, of the prompts that drop rows by it.

        Returns:
            By request id, [rows] float32 on the CPU.
        """
        found: list[torch.Tensor] = []
        lengths: dict[str, int] = {}
        first = 0
        pages = self.forward.pages[layer]
        # Neighbours, because their rows lie together in `hidden`.
        for needed, group in groupby(prompts, lambda prompt: prompt.needs_deviation_at(layer)):
            neighbours = list(group)
            parts = _rows(neighbours)
            counts = [len(part.positions) for part in parts]
            if not needed:
                first += sum(counts)
                continue
            lengths.update(zip((prompt.order.request_id for prompt in neighbours), counts, strict=True))
            for piece in slices(parts, self.most_rows):
                rows = self._batch([part for _, part in piece])
                new = self.forward.keys_values(layer, hidden.take(slice(first, first + len(rows))), rows)
                if pages.paged is not None:
                    found.append(kv_deviation(*new, pages.paged, rows.slots))
                else:
                    found.append(squared_distance(new, pages.read(rows.slots)))
                first += len(rows)
        deviations = torch.empty(0)
        if found:
            summed = self.ranks.sum(found[0] if len(found) == 1 else torch.cat(found))
            placing.start_all()
            deviations = summed.cpu()
        return dict(zip(lengths, deviations.split(list(lengths.values())), strict=True))


def _reason(error: Exception) -> str:
    """Why a chunk cannot be had."""
    if isinstance(error, ChunkUnavailable):
        return error.reason.value
    logger.error("a chunk could not be read", exc_info=error)
    return UnavailableReason.UNREADABLE.value


def _rows(prompts: Sequence[_Prompt]) -> list[PromptRows]:
    return [prompt.rows for prompt in prompts if prompt.rows is not None]


def _account(prompt: _Prompt) -> BlendDone:
    plan, selection = prompt.plan, prompt.selection
    report = BlendReport(bytes_loaded=prompt.bytes_loaded, fallback_reasons=plan.fallback_reasons)
    if selection is None:
        return BlendDone(report, ((0, ()),), prompt.unavailable)
    note_blend(report, plan, selection)
    return BlendDone(report, selection.layer_rows, prompt.unavailable)
