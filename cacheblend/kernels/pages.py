"""One layer's keys and values as they lie in a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheblend.errors import BlendError


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """Views of one attention layer's paged keys and values; nothing is copied.

    Position p of a prompt lies in block `block_table[p // block_size]` at slot `p % block_size`.

    Attributes:
        keys: [blocks, block_size, kv_heads, head_dim], any strides but a last one of 1.
        values: the same shape, dtype and strides, so that one offset finds a position's key and its value.

    Raises:
        BlendError: shapes, dtypes or strides differ, or the last dimension is not contiguous.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.keys.dim() != 4 or self.keys.shape != self.values.shape:
            raise BlendError(
                f"paged keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} must both be "
                "[blocks, block_size, kv_heads, head_dim] views of one cache."
            )
        if self.keys.dtype != self.values.dtype:
            raise BlendError(f"paged keys are {self.keys.dtype} and values {self.values.dtype}: give one dtype.")
        if self.keys.stride() != self.values.stride() or self.keys.stride(3) != 1:
            raise BlendError(
                f"paged keys have strides {self.keys.stride()} and values {self.values.stride()}: "
                "give views with equal strides whose last dimension is contiguous."
            )

    @classmethod
    def stacked(cls, cache: torch.Tensor) -> PagedLayer:
        """From a cache that stacks keys and values within a block (vLLM 0.25's FlashAttention).

        Args:
            cache: [blocks, 2, block_size, kv_heads, head_dim].
        """
        return cls(cache[:, 0], cache[:, 1])

    @classmethod
    def packed(cls, cache: torch.Tensor) -> PagedLayer:
        """From a cache that keeps a token's value right behind its key (vLLM 0.28's FlashAttention).

        Args:
            cache: [blocks, kv_heads, block_size, 2 * head_dim].
        """
        by_slot = cache.transpose(1, 2)
        dim = cache.shape[3] // 2
        return cls(by_slot[..., :dim], by_slot[..., dim:])

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the layer."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Elements of one head's key."""
        return self.keys.shape[3]

    def gather(self, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a prompt's first positions out of the pages.

        Args:
            block_table: [max_blocks] integer, the prompt's blocks in order.
            length: positions to copy, at most max_blocks * block_size.

        Returns:
            Keys and values, each [length, kv_heads, head_dim] contiguous.
        """
        blocks = block_table[: -(-length // self.block_size)].long()
        return self.keys[blocks].flatten(0, 1)[:length], self.values[blocks].flatten(0, 1)[:length]
