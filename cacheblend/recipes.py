"""CacheBlend's recipes, whatever runs the model: `hack_kv` out, `old_kvs` in.

As in CacheBlend's code, keys in both are position-free (before RoPE), so that users may cut and concatenate them
along the token axis as they please.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cacheblend.errors import BlendError
from cacheblend.metadata import CacheFuseMetadata
from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.relocation import rotate_keys, unrotate_keys
from cacheblend.selectors import Selector, make_selector
from cacheblend.selectors.deviation import DeviationSelector
from kvstore.chunk import ChunkKV
from kvstore.key import ChunkIdentity

LayerKV = list[torch.Tensor]
"""[k, v] of one layer, each [tokens, kv_heads * head_dim]; k before RoPE."""


class RotatedKV(Protocol):
    """What a model's KV looks like, and how its keys are rotated."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV."""
        ...

    @property
    def device(self) -> torch.device:
        """Where rotations are computed."""
        ...

    @property
    def rope_scaling(self) -> float:
        """The factor the rotary tables carry (YaRN), 1 otherwise."""
        ...

    def rotary_tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) at `positions` ([n] int64), each [n, head_dim] float32."""
        ...


def position_free(model: RotatedKV, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
    """One layer's [k, v] as users hold them.

    Args:
        model: the model the KV is of.
        keys: [tokens, kv_heads, head_dim] rotated at positions 0, 1, ...
        values: [tokens, kv_heads, head_dim].

    Returns:
        Copies, each [tokens, kv_heads * head_dim].
    """
    tokens = len(keys)
    positions = torch.arange(tokens, device=model.device)
    keys = unrotate_keys(keys, model.rotary_tables, positions, model.rope_scaling)
    return [keys.reshape(tokens, -1).clone(), values.reshape(tokens, -1).clone()]


def plan_from_old_kvs(
    model: RotatedKV,
    metadata: CacheFuseMetadata,
    token_ids: Sequence[int],
    old_kvs: Sequence[LayerKV] | None,
    fingerprint: str,
) -> tuple[BlendPlan, ChunkKV]:
    """The plan of CacheBlend's third recipe: everything before the suffix is reused from `old_kvs`.

    Args:
        model: the model the KV is of.
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
    if old_kvs is None or len(old_kvs) != model.num_layers:
        raise BlendError(
            f"cache_fuse_metadata['check'] needs runner.old_kvs with [k, v] of all {model.num_layers} layers; "
            "collect them from hack_kv first."
        )
    width = model.kv_heads * model.head_dim
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
    chunk = ChunkKV(identity, _rotated(model, old_kvs, reusable))
    segments = (
        Segment(SegmentRole.CHUNK, identity.token_ids, identity),
        Segment(SegmentRole.QUESTION, tuple(token_ids[reusable:])),
    )
    return BlendPlan(segments, _selector(metadata), stored_by_us=False), chunk


def _rotated(model: RotatedKV, old_kvs: Sequence[LayerKV], rows: int) -> torch.Tensor:
    cos, sin = model.rotary_tables(torch.arange(rows, device=model.device))
    shape = (rows, model.kv_heads, model.head_dim)
    layers = [
        torch.stack([rotate_keys(k[:rows].reshape(shape), cos, sin), v[:rows].reshape(shape)]) for k, v in old_kvs
    ]
    return torch.stack(layers).to(model.dtype)


def _selector(metadata: CacheFuseMetadata) -> Selector:
    if metadata["selector"] == DeviationSelector.name:
        return DeviationSelector(metadata["recomp_ratio"], tuple(metadata["check_layers"]))
    return make_selector(metadata["selector"], metadata["recomp_ratio"])
