"""Small tables of the host's on the model's device, which nobody waits for.

They do not queue up behind chunk KV that is being copied on another stream: behind 128 MiB, a table of a prompt's rows
(360 KiB) came within 11 us on an H200. A kernel that reads page-locked memory by itself took 150 us there.
"""

from __future__ import annotations

import torch


def empty_table(*shape: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """[*shape] of `dtype` on the host, to be filled and brought to `device`: page-locked where that is a GPU."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`table` on `device`, for what is queued on the current stream afterwards.

    Args:
        table: on the host, not to be changed any more; page-locked first where `device` is a GPU and it is not yet.
        device: of the model.
    """
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
