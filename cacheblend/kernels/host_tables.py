"""Small tables of the host's on the model's device, which nobody waits for.

Behind one copy of 128 MiB on another stream, a table of a prompt's rows (360 KiB) came within 11 us on an H200. But
where several copies are asked for there, it comes when none of them is left: after 9.5 ms where nine chunks' layers
were asked for without end, after 1.2 where the next were asked for when those before were there. So who copies chunks
for a blend asks for few at a time. A kernel that reads page-locked memory by itself took 150 us.
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
