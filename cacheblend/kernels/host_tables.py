"""Small tables of the host's on the model's device, which nobody waits for.

Copies of chunks on another stream leave room for them in between (`kvstore.copy_turns`); what is queued behind a table
does not stand in line with those copies again. A kernel that reads page-locked memory by itself took 150 us.
"""

from __future__ import annotations

import torch

from kvstore.copy_turns import leave_copy_queue


def empty_table(*shape: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """[*shape] of `dtype` on the host, to be filled and brought to `device`: page-locked where that is a GPU."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`table` on `device`, for what is queued on the current stream afterwards.

    Args:
        table: on the host, not to be changed any more; page-locked first where `device` is a GPU and it is not yet.
        device: of the model.
    """
    if device.type != "cuda":
        return table.to(device)
    placed = torch.empty_like(table, device=device)
    bring(table.pin_memory(), placed)
    return placed


def bring(table: torch.Tensor, onto: torch.Tensor) -> None:
    """Have `onto` hold what `table` does, for what is queued on the current stream afterwards.

    Args:
        table: on the host, not to be changed any more; page-locked where `onto` is on a GPU.
        onto: of the same shape and dtype, on the model's device.
    """
    onto.copy_(table, non_blocking=True)
    if onto.is_cuda:
        leave_copy_queue(onto.device)
