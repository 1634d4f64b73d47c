"""CacheBlend's recipes on the reference runner: `hack_kv` out, `old_kvs` in.

As in CacheBlend's code, keys in both are position-free (before RoPE), so that users may cut and concatenate them
along the token axis as they please.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend.errors import BlendError
from cacheblend.metadata import CacheFuseMetadata
from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.reference.forward import RowsForward
from cacheblend.reference.sequence import RunningSequence
from cacheblend.relocation import rotate_keys, unrotate_keys
from cacheblend.selectors import Selector, make_selector
from cacheblend.selectors.deviation import DeviationSelector
from kvstore.chunk import ChunkKV
from kvstore.key import ChunkIdentity

LayerKV = list[torch.Tensor]
"""[k, v] of one layer, each [tokens, kv_heads * head_dim]; k before RoPE."""


def publish_hack_kv(forward: RowsForward, sequence: RunningSequence) -> None:
    """Keep each layer's [k, v] of a prefilled prompt in `layers[i].self_attn.hack_kv`."""
    length = sequence.plan.length
    positions = torch.arange(length, device=forward.device)
    for index, layer in enumerate(forward.layers):
        k = sequence.keys(index)[:, :length].transpose(0, 1)
        v = sequence.values(index)[:, :length].transpose(0, 1)
        k = unrotate_keys(k, forward.rotary_tables, positions, forward.rope_scaling)
        layer.self_attn.hack_kv = [k.reshape(length, -1).clone(), v.reshape(length, -1).clone()]


def plan_from_old_kvs(
    forward: RowsForward,
    metadata: CacheFuseMetadata,
    token_ids: Sequence[int],
    old_kvs: Sequence[LayerKV] | None,
    fingerprint: str,
) -> tuple[BlendPlan, ChunkKV]:
    """The plan of CacheBlend's third recipe: everything before the suffix is reused from `old_kvs`.

    Args:
        forward: the model the KV is of.
        metadata: with `check` set.
        token_ids: the whole prompt.
        old_kvs: for each layer [k, v] over at least the rows before the suffix.
        fingerprint: of the model.

    Returns:
        The plan and the one chunk it reuses.

    Raises:
        BlendError: if `suffix_len` leaves nothing to reuse or no question, or `old_kvs` are absent, too short or of
            another shape.
    """
    suffix = metadata["suffix_len"]
    reusable = len(token_ids) - suffix
    if not 0 < suffix < len(token_ids):
        raise BlendError(
            f"cache_fuse_metadata['suffix_len'] is {suffix} for a prompt of {len(token_ids)} tokens; "
            "set it to the number of tokens of the question."
        )
    if old_kvs is None or len(old_kvs) != forward.num_layers:
        raise BlendError(
            f"cache_fuse_metadata['check'] needs runner.old_kvs with [k, v] of all {forward.num_layers} layers; "
            "collect them from hack_kv first."
        )
    width = forward.kv_heads * forward.head_dim
    strange = next((part for layer in old_kvs for part in layer if part.dim() != 2 or part.shape[1] != width), None)
    if strange is not None:
        raise BlendError(
            f"old_kvs hold a tensor of shape {list(strange.shape)}, but k and v of a layer are [tokens, {width}]; "
            "collect them from hack_kv of this model."
        )
    rows = min(len(part) for layer in old_kvs for part in layer)
    if rows < reusable:
        raise BlendError(
            f"old_kvs hold {rows} rows but {reusable} come before the suffix; "
            "collect KV for all of them or set suffix_len to the question's true length."
        )
    identity = ChunkIdentity(fingerprint, (), tuple(token_ids[:reusable]))
    chunk = ChunkKV(identity, _rotated(forward, old_kvs, reusable))
    segments = (
        Segment(SegmentRole.CHUNK, identity.token_ids, identity),
        Segment(SegmentRole.QUESTION, tuple(token_ids[reusable:])),
    )
    return BlendPlan(segments, _selector(metadata)), chunk


def _rotated(forward: RowsForward, old_kvs: Sequence[LayerKV], rows: int) -> torch.Tensor:
    cos, sin = forward.rotary_tables(torch.arange(rows, device=forward.device))
    shape = (rows, forward.kv_heads, forward.head_dim)
    layers = [
        torch.stack([rotate_keys(k[:rows].reshape(shape), cos, sin), v[:rows].reshape(shape)]) for k, v in old_kvs
    ]
    return torch.stack(layers).to(forward.dtype)


def _selector(metadata: CacheFuseMetadata) -> Selector:
    if metadata["selector"] == DeviationSelector.name:
        return DeviationSelector(metadata["recomp_ratio"], tuple(metadata["check_layers"]))
    return make_selector(metadata["selector"], metadata["recomp_ratio"])
