"""The model's own layers over any rows of any sequences, through transformers' attention interface.

No model code is copied: embedding, rotary tables, decoder layers, final norm and head are the model's modules, called
one after another. Only the attention function is ours; it writes the new keys and values where they belong and
attends by position. New KV is written for all rows before any row attends, so each row sees exactly the keys at or
before it: recomputed ones where there are, stored ones elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from cacheblend.drift import ChunkDrift, key_shift
from cacheblend.reference.attention import attend_rows, attention_mass
from cacheblend.reference.rows import RowBatch, SequenceRows
from cacheblend.reference.sequence import RunningSequence
from cacheblend.selectors.query import first_tallied_layer

ATTENTION_NAME = "cacheblend_rows"

AttentionStep = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(layer, query, key, value, scaling) -> output; tensors are [heads or kv_heads, rows, head_dim]."""

Drifts = Mapping[str, Sequence[ChunkDrift]]
"""Of each sequence, by its id."""


class _AttentionReached(Exception):
    """Ends a layer once its keys and values are known."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_step: AttentionStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    del attention_mask
    out = attention_step(int(cast(Any, module).layer_idx), query[0], key[0], value[0], scaling)
    return out.transpose(0, 1).unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask follows from the rows' positions inside `attend_rows`; transformers need not build one."""


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


class RowsForward:
    """Runs a transformers causal language model over row batches.

    Args:
        model: a supported `*ForCausalLM` in eval mode; its attention implementation is set to ours.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        model.set_attn_implementation(ATTENTION_NAME)
        self._decoder = model.get_decoder()
        self.layers = self._decoder.layers
        self.num_layers = len(self.layers)
        config = model.config
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device

    @property
    def rope_scaling(self) -> float:
        """The factor the model's rotary tables carry (YaRN), 1 otherwise."""
        return float(self._decoder.rotary_emb.attention_scaling)

    def rotary_tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own (cos, sin) at `positions` ([n] int64), each [n, head_dim] float32."""
        probe = torch.empty(0, dtype=torch.float32, device=self.device)
        cos, sin = self._decoder.rotary_emb(probe, positions[None].to(self.device))
        return cos[0], sin[0]

    def allocate(self, sequence: RunningSequence) -> None:
        """Give a sequence its KV: [layers, 2, kv_heads, capacity, head_dim], uninitialised."""
        shape = (self.num_layers, 2, self.kv_heads, sequence.capacity, self.head_dim)
        sequence.kv = torch.empty(shape, dtype=self.dtype, device=self.device)

    def embed(self, rows: RowBatch) -> torch.Tensor:
        """[1, rows, hidden] input embeddings."""
        return self._decoder.embed_tokens(rows.token_ids()[None])

    def rotary(self, rows: RowBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary tables of the rows in the model's dtype, the same for every layer."""
        return self._decoder.rotary_emb(hidden, rows.positions()[None])

    def layer(
        self,
        index: int,
        hidden: torch.Tensor,
        rows: RowBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        tally: dict[str, torch.Tensor] | None = None,
        drifts: Drifts | None = None,
    ) -> torch.Tensor:
        """One decoder layer: writes the rows' KV, attends, returns the new hidden states.

        Args:
            index: the layer.
            hidden: [1, rows, hidden].
            rows: the batch; each sequence's KV must be there for every earlier position of its rows.
            rotary: from `rotary`.
            tally: by sequence id, [positions] float32 that attention mass from the question's rows is added to, from
                `first_tallied_layer` on.
            drifts: by sequence id, the chunks whose other rows move with these.

        Returns:
            [1, rows, hidden].
        """

        def step(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
            out = torch.empty_like(q)
            for part, where in rows:
                sequence, positions = part.sequence, part.positions
                self._write(layer, part, k[:, where], v[:, where], drifts)
                keys, values = sequence.keys(layer), sequence.values(layer)
                out[:, where] = attend_rows(q[:, where], keys, values, part.blocks, scaling)
                if tally is not None and sequence.id in tally and layer >= first_tallied_layer(self.num_layers):
                    asking = positions >= sequence.plan.question.start
                    mass = attention_mass(q[:, where][:, asking], keys, positions[asking], scaling)
                    tally[sequence.id][: len(mass)] += mass
            return out

        return self._call_layer(index, hidden, rows, rotary, step)

    def keys_values(
        self, index: int, hidden: torch.Tensor, rows: RowBatch, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only the rows' keys (rotated) and values of layer `index`, each [kv_heads, rows, head_dim]."""

        def step(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
            raise _AttentionReached(k, v)

        try:
            self._call_layer(index, hidden, rows, rotary, step)
        except _AttentionReached as reached:
            return reached.keys, reached.values
        raise AssertionError("the layer ended without attention")

    def write_last_layer(
        self,
        hidden: torch.Tensor,
        rows: RowBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        drifts: Drifts | None = None,
    ) -> None:
        """Write the rows' KV of the last layer; nothing reads the hidden states of rows before the question."""
        last = self.num_layers - 1
        k, v = self.keys_values(last, hidden, rows, rotary)
        for part, where in rows:
            self._write(last, part, k[:, where], v[:, where], drifts)

    def _write(
        self, layer: int, part: SequenceRows, keys: torch.Tensor, values: torch.Tensor, drifts: Drifts | None
    ) -> None:
        """Write the rows' new KV, [kv_heads, rows, head_dim] each, and move those that go with them."""
        stored_keys, stored_values = part.sequence.keys(layer), part.sequence.values(layer)
        for drift in drifts.get(part.sequence.id, ()) if drifts is not None else ():
            of_keys = _rows_first(keys[:, drift.rows]).float() - _rows_first(stored_keys[:, drift.told]).float()
            of_values = _rows_first(values[:, drift.rows]).float() - _rows_first(stored_values[:, drift.told]).float()
            moved = key_shift(drift, of_keys, self.rotary_tables, self.rope_scaling)
            _add(stored_keys, drift.left, moved)
            _add(stored_values, drift.left, drift.shift(of_values))
        stored_keys[:, part.positions], stored_values[:, part.positions] = keys, values

    def logits(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """[len(index), vocabulary] float32 logits of the rows at `index` ([n] int64) of `hidden`."""
        normed = self._decoder.norm(hidden[0, index.to(self.device)])
        return self.model.lm_head(normed).float()

    def run(
        self,
        rows: RowBatch,
        before_layer: Callable[[int], None] | None = None,
        tally: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """All layers over one set of rows; `before_layer` is called with each layer's index before it runs.

        Returns:
            [1, rows, hidden] hidden states before the final norm.
        """
        hidden = self.embed(rows)
        rotary = self.rotary(rows, hidden)
        for index in range(self.num_layers):
            if before_layer is not None:
                before_layer(index)
            hidden = self.layer(index, hidden, rows, rotary, tally)
        return hidden

    def _call_layer(
        self,
        index: int,
        hidden: torch.Tensor,
        rows: RowBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        step: AttentionStep,
    ) -> torch.Tensor:
        return self.layers[index](
            hidden,
            attention_mask=None,
            position_ids=rows.positions()[None],
            position_embeddings=rotary,
            attention_step=step,
        )


def _rows_first(heads_first: torch.Tensor) -> torch.Tensor:
    return heads_first.transpose(0, 1)


def _add(stored: torch.Tensor, positions: torch.Tensor, shift: torch.Tensor) -> None:
    """Add `shift` ([n, kv_heads, head_dim] float32) to rows of `stored` ([kv_heads, capacity, head_dim])."""
    moved = stored[:, positions].float() + shift.transpose(0, 1)
    stored[:, positions] = moved.to(stored.dtype)


def question_tally(sequences: Collection[RunningSequence], device: torch.device) -> dict[str, torch.Tensor]:
    """An empty tally for `RowsForward.layer`: zeros over each sequence's prompt."""
    return {s.id: torch.zeros(s.plan.length, dtype=torch.float32, device=device) for s in sequences}
