"""Prefills chunks behind a prefix and takes their KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cacheblend.plan import full_prefill_plan
from cacheblend.reference.forward import RowsForward
from cacheblend.reference.rows import RowBatch, SequenceRows
from cacheblend.reference.sequence import RunningSequence
from cacheblend.sampling_params import SamplingParams
from kvstore.chunk import ChunkKV
from kvstore.key import ChunkIdentity

MAX_BATCH_ROWS = 2048


class ChunkCollector:
    """Computes chunk KV; a prefix is prefilled once for all chunks behind it.

    Its KV is kept until another prefix or `close`: corpora are collected a few chunks a call, all behind one prefix.

    Args:
        forward: runs the model.
    """

    def __init__(self, forward: RowsForward) -> None:
        self._forward = forward
        self._last_prefix: tuple[tuple[int, ...], torch.Tensor] | None = None

    @torch.inference_mode()
    def collect(self, identities: Sequence[ChunkIdentity]) -> Iterator[ChunkKV]:
        """KV of each chunk, in order, computed in batches of at most `MAX_BATCH_ROWS` rows, or of one chunk.

        Args:
            identities: chunks that share one prefix.

        Yields:
            The chunk's KV, [layers, 2, tokens, kv_heads, head_dim], without the prefix's rows.
        """
        prefix_kv: torch.Tensor | None = None
        if identities and identities[0].prefix_ids:
            prefix_kv = self._prefix_kv(identities[0].prefix_ids)
        for batch in _batches(identities):
            yield from self._collect_batch(batch, prefix_kv)

    def close(self) -> None:
        """Give the kept prefix's memory back; collecting again prefills it anew."""
        self._last_prefix = None

    def _prefix_kv(self, prefix_ids: tuple[int, ...]) -> torch.Tensor:
        # One read and one write: threads that collect at once may prefill a prefix twice, never mix two.
        last = self._last_prefix
        if last is not None and last[0] == prefix_ids:
            return last[1]
        # Let go of before the next is computed, so that there is never memory for two.
        last = self._last_prefix = None
        kv = self._prefill(prefix_ids)
        self._last_prefix = prefix_ids, kv
        return kv

    def _prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        sequence = self._sequence("prefix", token_ids)
        self._forward.run(RowBatch([self._rows(sequence, 0)]))
        assert sequence.kv is not None
        return sequence.kv

    def _collect_batch(self, batch: list[ChunkIdentity], prefix_kv: torch.Tensor | None) -> Iterator[ChunkKV]:
        parts = []
        for index, identity in enumerate(batch):
            sequence = self._sequence(str(index), [*identity.prefix_ids, *identity.token_ids])
            base = identity.base_position
            if prefix_kv is not None:
                assert sequence.kv is not None
                sequence.kv[:, :, :, :base] = prefix_kv[:, :, :, :base]
            parts.append(self._rows(sequence, base))
        self._forward.run(RowBatch(parts))
        for identity, part in zip(batch, parts, strict=True):
            kv = part.sequence.kv
            assert kv is not None
            end = identity.base_position + len(identity.token_ids)
            yield ChunkKV(identity, kv[:, :, :, identity.base_position : end].transpose(2, 3).contiguous().cpu())

    def _sequence(self, name: str, token_ids: Sequence[int]) -> RunningSequence:
        sequence = RunningSequence(name, full_prefill_plan(token_ids), SamplingParams(max_tokens=1))
        self._forward.allocate(sequence)
        return sequence

    def _rows(self, sequence: RunningSequence, start: int) -> SequenceRows:
        positions = torch.arange(start, sequence.plan.length, device=self._forward.device)
        return SequenceRows(sequence, positions)


def _batches(identities: Sequence[ChunkIdentity]) -> Iterator[list[ChunkIdentity]]:
    batch: list[ChunkIdentity] = []
    rows = 0
    for identity in identities:
        # The prefix's rows are not computed again, but every sequence holds a copy of their KV.
        held = identity.base_position + len(identity.token_ids)
        if batch and rows + held > MAX_BATCH_ROWS:
            yield batch
            batch, rows = [], 0
        batch.append(identity)
        rows += held
    if batch:
        yield batch
