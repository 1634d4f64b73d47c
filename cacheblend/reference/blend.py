"""Blended prefill: from a plan to a sequence's KV and the logits after its prompt.

Up to four stages, each timed apart:

1. load: stored KV is read; a chunk that cannot be had becomes fresh rows of the same plan. A prompt whose selector
   recomputes everything reads none, and so it can lack none.
2. score (selectors that need attention): fresh rows and the question run over plain reuse, and the question's
   attention is tallied.
3. recompute: chosen rows and fresh rows of the context run through every layer. `deviation` narrows the chosen rows
   at its check layers (arXiv:2405.16444, figure 9). Where the plan says so, rows left alone move with these.
4. question: ordinary prefill of the question. A full prefill is this stage over all rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from cacheblend.drift import chunk_drifts
from cacheblend.reference.forward import Drifts, RowsForward, question_tally
from cacheblend.reference.placement import Placement
from cacheblend.reference.rows import RowBatch, SequenceRows
from cacheblend.reference.sequence import RunningSequence
from cacheblend.reference.stopwatch import Stopwatch
from cacheblend.reports import note_blend
from cacheblend.selectors.base import Evidence
from cacheblend.selectors.selection import RowSelection
from kvstore.chunk import ChunkKV
from kvstore.errors import ChunkUnavailable, UnavailableReason
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.store import ChunkStore
from kvstore.tiers import Tier

logger = logging.getLogger(__name__)


class BlendedPrefill:
    """Prefills batches of sequences.

    Args:
        forward: runs the model.
        store: where chunks come from; without one, only chunks provided with a sequence are found.
    """

    def __init__(self, forward: RowsForward, store: ChunkStore | None) -> None:
        self._forward = forward
        self._store = store

    @torch.inference_mode()
    def run(self, sequences: list[RunningSequence]) -> list[torch.Tensor]:
        """Prefill `sequences` together and set their reports and effective plans.

        Returns:
            For each, [1 + forced ids, vocabulary] float32: the logits after the prompt and after each forced id.
        """
        watch = Stopwatch(self._forward.device)
        with watch.part("load"):
            chunks = [self._load(sequence) for sequence in sequences]
        for sequence in sequences:
            self._forward.allocate(sequence)
        placements = _LayerPlacements(
            [Placement(self._forward, s, c) for s, c in zip(sequences, chunks, strict=True)], watch
        )
        blended = [s for s in sequences if s.plan.reused]
        with watch.part("score"):
            scores = self._score(blended, placements)
        with watch.part("recompute"):
            selections = self._recompute(blended, scores, placements, watch)
        with watch.part("question"):
            logits = self._finish(sequences, placements)
        for sequence in sequences:
            _complete_report(sequence, selections.get(sequence.id), watch.milliseconds)
        return logits

    def _load(self, sequence: RunningSequence) -> dict[ChunkKey, ChunkKV]:
        """Get the chunks that the plan reads; the plan is changed so that what cannot be had is fresh."""
        found: dict[ChunkKey, ChunkKV] = {}
        reasons: dict[ChunkKey, str] = {}
        bytes_by_tier: dict[str, int] = {}
        for identity in sequence.plan.chunks_read:
            try:
                tier, chunk = self._get(sequence, identity)
            except ChunkUnavailable as gone:
                reasons[identity.key] = gone.reason.value
                logger.warning("chunk %s is prefilled as fresh rows: %s", identity.key[:12], gone.reason.value)
                continue
            found[identity.key] = chunk
            bytes_by_tier[tier] = bytes_by_tier.get(tier, 0) + chunk.nbytes
        sequence.plan = sequence.plan.with_fresh(reasons)
        sequence.report.bytes_loaded = bytes_by_tier
        return found

    def _get(self, sequence: RunningSequence, identity: ChunkIdentity) -> tuple[str, ChunkKV]:
        if identity.key in sequence.provided:
            return Tier.HOST.value, sequence.provided[identity.key]
        if self._store is None:
            raise ChunkUnavailable(identity.key, UnavailableReason.MISSING, "the runner has no store")
        chunk, tier = self._store.fetch(identity)
        if chunk.kv.dtype != self._forward.dtype:
            raise ChunkUnavailable(identity.key, UnavailableReason.OTHER_MODEL, f"its KV is {chunk.kv.dtype}")
        return tier.value, chunk

    def _score(self, blended: list[RunningSequence], placements: _LayerPlacements) -> dict[str, torch.Tensor]:
        """Attention mass from the question to each row before it, for the sequences whose selector asks for it."""
        asking = [s for s in blended if s.plan.selector and s.plan.selector.needs(Evidence.ATTENTION)]
        if not asking:
            return {}
        tally = question_tally(asking, self._forward.device)
        # Forced ids do not choose: an answer that is decoded has no say either.
        asked = [self._tail(s)[: s.plan.question.length] for s in asking]
        rows = [SequenceRows(s, torch.cat([self._fresh(s), q])) for s, q in zip(asking, asked, strict=True)]
        self._forward.run(RowBatch(rows), placements.ensure, tally)
        return {s.id: tally[s.id] for s in asking}

    def _recompute(
        self,
        blended: list[RunningSequence],
        scores: dict[str, torch.Tensor],
        placements: _LayerPlacements,
        watch: Stopwatch,
    ) -> dict[str, RowSelection]:
        """Run the chosen and the fresh rows of the context through every layer, narrowing on the way."""
        forward = self._forward
        selections = {}
        for s in blended:
            fresh = self._fresh(s)
            if s.id in scores:
                # The scoring pass has computed the rows before the first reused one for good.
                fresh = fresh[fresh > s.plan.reused[0].start]
            selections[s.id] = RowSelection(s.plan, forward.num_layers, forward.device, fresh, scores.get(s.id))
        rows = RowBatch([SequenceRows(s, selections[s.id].positions) for s in blended])
        state = self._enter(rows)
        drifts = _drifts(state.rows)
        for layer in range(forward.num_layers):
            placements.ensure(layer)
            if len(state.rows) and any(selection.drops_at(layer) for selection in selections.values()):
                with watch.part("score"):
                    state = self._narrow(layer, state, selections)
                drifts = _drifts(state.rows)
            for selection in selections.values():
                selection.count_layers()
            state = self._advance(layer, state, drifts)
        return selections

    def _enter(self, rows: RowBatch) -> _State:
        if not len(rows):
            return _State(rows, torch.empty(0), (torch.empty(0), torch.empty(0)))
        hidden = self._forward.embed(rows)
        return _State(rows, hidden, self._forward.rotary(rows, hidden))

    def _advance(self, layer: int, state: _State, drifts: Drifts) -> _State:
        if not len(state.rows):
            return state
        if layer == self._forward.num_layers - 1:
            self._forward.write_last_layer(state.hidden, state.rows, state.rotary, drifts)
            return state
        hidden = self._forward.layer(layer, state.hidden, state.rows, state.rotary, drifts=drifts)
        return _State(state.rows, hidden, state.rotary)

    def _narrow(self, layer: int, state: _State, selections: dict[str, RowSelection]) -> _State:
        """Drop the rows whose KV at `layer` deviates least from the stored KV."""
        k, v = self._forward.keys_values(layer, state.hidden, state.rows, state.rotary)
        kept, parts = [], []
        for part, where in state.rows:
            selection, stored = selections[part.sequence.id], part.sequence
            keep = torch.ones(len(part.positions), dtype=torch.bool, device=self._forward.device)
            if selection.needs_deviation_at(layer):
                old_k, old_v = stored.keys(layer)[:, part.positions], stored.values(layer)[:, part.positions]
                keep = selection.narrow(layer, _deviation(k[:, where], old_k) + _deviation(v[:, where], old_v))
            elif selection.drops_at(layer):
                keep = selection.narrow(layer)
            kept.append(keep)
            parts.append(SequenceRows(stored, part.positions[keep]))
        going_on = torch.cat(kept)
        cos, sin = state.rotary
        return _State(RowBatch(parts), state.hidden[:, going_on], (cos[:, going_on], sin[:, going_on]))

    def _finish(self, sequences: list[RunningSequence], placements: _LayerPlacements) -> list[torch.Tensor]:
        rows = RowBatch([SequenceRows(s, self._tail(s)) for s in sequences])
        hidden = self._forward.run(rows, placements.ensure)
        counts = [1 + len(s.forced) for s in sequences]
        return list(self._forward.logits(hidden, rows.last_rows(counts)).split(counts))

    def _fresh(self, sequence: RunningSequence) -> torch.Tensor:
        """[n] int64 fresh rows before the question."""
        ranges = [torch.arange(s.start, s.end) for s in sequence.plan.spans[:-1] if not s.segment.reused]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ranges]).to(self._forward.device)

    def _tail(self, sequence: RunningSequence) -> torch.Tensor:
        """[n] int64 rows of the last pass, forced ids included."""
        end = sequence.plan.length + len(sequence.forced)
        return torch.arange(sequence.tail_start, end, device=self._forward.device)


@dataclass(frozen=True)
class _State:
    """Where a pass stands: rows, [1, rows, hidden] hidden states, and the rows' rotary tables."""

    rows: RowBatch
    hidden: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]


class _LayerPlacements:
    """Places each layer of all sequences once, when the first pass comes to it."""

    def __init__(self, placements: list[Placement], watch: Stopwatch) -> None:
        self._placements = placements
        self._watch = watch
        self._done: set[int] = set()

    def ensure(self, layer: int) -> None:
        if layer in self._done:
            return
        self._done.add(layer)
        with self._watch.part("relocate"):
            for placement in self._placements:
                placement.place(layer)


def _drifts(rows: RowBatch) -> Drifts:
    """What the rows left alone go with, of the sequences that ask for it."""
    carried = [(part.sequence, part.positions) for part, _ in rows if part.sequence.plan.moves_rows]
    return {sequence.id: chunk_drifts(sequence.plan, positions) for sequence, positions in carried}


def _deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Squared difference summed over heads and elements: [kv_heads, n, head_dim] twice -> [n] float32."""
    return (new.float() - old.float()).pow(2).sum((0, 2))


def _complete_report(sequence: RunningSequence, selection: RowSelection | None, parts_ms: dict[str, float]) -> None:
    report, plan = sequence.report, sequence.plan
    report.parts_ms = dict(parts_ms)
    report.fallback_reasons = plan.fallback_reasons
    if selection is not None:
        note_blend(report, plan, selection)
