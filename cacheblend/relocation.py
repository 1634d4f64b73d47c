"""Relocation: keys rotated for one position become keys rotated for another.

RoPE (arXiv:2104.09864, equation 34) rotates each pair of key elements by an angle linear in the position, so a key
moved from position p to q is the same key rotated by the difference. The model computes its angles from fp32
positions and frequencies; composing its own tables at both ends cancels their rounding, which a rotation by the
bare difference does not (2e-6 against 4e-4 at a shift of some thousand positions).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RotaryTables = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From positions [n] int64 to the model's own (cos, sin), each [n, head_dim] float32, scaling included."""


def rotation_between(
    tables: RotaryTables, old: torch.Tensor, new: torch.Tensor, scaling: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pure rotation that moves keys from `old` to `new` positions.

    Args:
        tables: the model's rotary tables.
        old: [n] int64 positions the keys are rotated for.
        new: [n] int64 positions they are moved to.
        scaling: the factor the tables carry (YaRN's attention scaling); the keys carry it already, once.

    Returns:
        (cos, sin), each [n, head_dim] float32.
    """
    cos_old, sin_old = tables(old)
    cos_new, sin_new = tables(new)
    norm = scaling * scaling
    cos = (cos_new * cos_old + sin_new * sin_old) / norm
    sin = (sin_new * cos_old - cos_new * sin_old) / norm
    return cos, sin


def rotate_keys(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate keys whose two halves are paired ("neox" order, the only one the supported families use).

    Args:
        keys: [n, kv_heads, head_dim], any float dtype.
        cos: [n, head_dim] float32.
        sin: [n, head_dim] float32.

    Returns:
        [n, kv_heads, head_dim] in the dtype of `keys`; the rotation itself is done in float32.
    """
    half = keys.shape[-1] // 2
    wide = keys.float()
    turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
    return (wide * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(keys.dtype)


def unrotate_keys(keys: torch.Tensor, tables: RotaryTables, positions: torch.Tensor, scaling: float) -> torch.Tensor:
    """Take the rotation and its scaling off: keys as they were before RoPE.

    Args:
        keys: [n, kv_heads, head_dim] rotated for `positions`.
        tables: the model's rotary tables.
        positions: [n] int64.
        scaling: the factor the tables carry.

    Returns:
        [n, kv_heads, head_dim] in the dtype of `keys`.
    """
    cos, sin = tables(positions)
    norm = scaling * scaling
    return rotate_keys(keys, cos / norm, -sin / norm)
