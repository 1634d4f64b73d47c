"""`hack_kv` on the reference runner: each layer's KV of the last prompt, kept at the layer itself."""

from __future__ import annotations

from cacheblend.recipes import position_free
from cacheblend.reference.forward import RowsForward
from cacheblend.reference.sequence import RunningSequence


def publish_hack_kv(forward: RowsForward, sequence: RunningSequence) -> None:
    """Keep each layer's [k, v] of a prefilled prompt in `layers[i].self_attn.hack_kv`."""
    length = sequence.plan.length
    for index, layer in enumerate(forward.layers):
        keys = sequence.keys(index)[:, :length].transpose(0, 1)
        values = sequence.values(index)[:, :length].transpose(0, 1)
        layer.self_attn.hack_kv = position_free(forward, keys, values)
