"""A chunk's keys and values as one tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvstore.errors import StoreError
from kvstore.key import ChunkIdentity, ShardLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """The KV of one chunk, or of one tensor-parallel shard of it.

    Attributes:
        identity: what was encoded.
        kv: [layers, 2, tokens, kv_heads, head_dim], contiguous, fp32, bf16 or fp16. Index 0 of the second
            dimension is K, rotated at positions base_position, base_position + 1, ...; index 1 is V.
        shard: which rank's heads `kv` holds.
        nbytes: of the tensor.

    Raises:
        StoreError: the tensor is not of that shape, dtype or layout.
    """

    identity: ChunkIdentity
    kv: torch.Tensor
    shard: ShardLayout = field(default_factory=ShardLayout)
    nbytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shape = tuple(self.kv.shape)
        if len(shape) != 5 or shape[1] != 2 or 0 in shape:
            raise StoreError(f"Chunk KV has shape {list(shape)}; it must be [layers, 2, tokens, kv_heads, head_dim].")
        if shape[2] != len(self.identity.token_ids):
            raise StoreError(
                f"Chunk KV holds {shape[2]} tokens; the chunk has {len(self.identity.token_ids)} token ids."
            )
        if self.kv.dtype not in DTYPES:
            raise StoreError(f"Chunk KV is {self.kv.dtype}; store float32, bfloat16 or float16.")
        if not self.kv.is_contiguous():
            raise StoreError("Chunk KV must be contiguous; call .contiguous() on it first.")
        # Once: bookkeeping asks for it many times a transfer.
        object.__setattr__(self, "nbytes", self.kv.numel() * self.kv.element_size())

    def k(self, layer: int) -> torch.Tensor:
        """Rotated keys of one layer, [tokens, kv_heads, head_dim], a view."""
        return self.kv[layer, 0]

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer, [tokens, kv_heads, head_dim], a view."""
        return self.kv[layer, 1]


def tensor_bytes(kv: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, shared with it."""
    return kv.detach().view(-1).view(torch.uint8).numpy().data
