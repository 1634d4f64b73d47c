"""The model's rotary tables in fp32.

vLLM casts its own tables to the model's dtype, too coarse to move keys with. These come from transformers' module for
the same configuration; the gates compare moved keys with vLLM's own.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cacheblend.kernels.place_rows import Rotations
from cacheblend.relocation import rotation_between


class RotaryTables:
    """Rotations between positions.

    Args:
        config: the model's transformers configuration.
        device: where they are used.
        positions: of the longest sequence, for `all`.
    """

    def __init__(self, config: Any, device: torch.device, positions: int = 0) -> None:
        self._embedding = LlamaRotaryEmbedding(config).to(device)
        self._device = device
        self._positions = positions

    @property
    def scaling(self) -> float:
        """The factor the tables carry (YaRN), 1 otherwise."""
        return float(self._embedding.attention_scaling)

    @cached_property
    def all(self) -> Rotations:
        """The tables for every position, made once."""
        cos, sin = self.tables(torch.arange(self._positions, device=self._device))
        half = cos.shape[1] // 2
        return Rotations(cos[:, :half].contiguous(), sin[:, :half].contiguous(), self.scaling)

    def between(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotation of keys from positions `old` to positions `new`, each [n] int64 on the tables' device.

        Returns:
            (cos, sin), each [n, head_dim] float32; exactly (1, 0) where a key stays.
        """
        cos, sin = rotation_between(self.tables, old, new, self.scaling)
        stays = (old == new)[:, None]
        return cos.masked_fill(stays, 1.0), sin.masked_fill(stays, 0.0)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own (cos, sin) at `positions` ([n] int64), each [n, head_dim] float32, scaling included."""
        probe = torch.empty(0, dtype=torch.float32, device=self._device)
        cos, sin = self._embedding(probe, positions[None])
        return cos[0], sin[0]
