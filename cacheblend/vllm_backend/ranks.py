"""The tensor-parallel ranks of one engine, which must decide alike."""

from __future__ import annotations

from typing import TypeVar

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_reduce,
)

from kvstore.key import ChunkKey, ShardLayout

K = TypeVar("K")


class Ranks:
    """What one rank asks the others."""

    def __init__(self) -> None:
        self.shard = ShardLayout(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of `values` (any shape, on the model's device): each rank sees its own heads only."""
        return values if self.shard.size == 1 else tensor_model_parallel_all_reduce(values)

    def agree(self, reasons: dict[ChunkKey, str]) -> dict[ChunkKey, str]:
        """What any rank cannot have, no rank uses: the union of all ranks' reasons."""
        if self.shard.size == 1:
            return reasons
        everyone: list[dict[ChunkKey, str] | None] = [None] * self.shard.size
        torch.distributed.all_gather_object(everyone, reasons, group=get_tp_group().cpu_group)
        return {key: reason for each in reversed(everyone) for key, reason in (each or {}).items()}
