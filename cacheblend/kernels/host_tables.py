"""Small tables of the host's on the model's device, which nobody waits for, and of the device's on the host.

They do not queue up behind chunk KV that is being copied on another stream: behind 128 MiB, a table of a prompt's rows
(360 KiB) came within 11 us on an H200. A kernel that reads page-locked memory by itself took 150 us there.
"""

from __future__ import annotations

import torch


def empty_table(*shape: int, device: torch.device) -> torch.Tensor:
    """[*shape] int64 on the host, to be filled and brought to `device`: page-locked where that is a GPU."""
    return torch.empty(*shape, dtype=torch.int64, pin_memory=device.type == "cuda")


def on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`table` on `device`, for what is queued on the current stream afterwards.

    Args:
        table: on the host, not to be changed any more; page-locked first where `device` is a GPU and it is not yet.
        device: of the model.
    """
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)


class ComingTable:
    """A table of the device's on its way to the host, behind what is queued on the current stream so far.

    Args:
        table: any shape and dtype, on any device.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        self._table = table
        if table.is_cuda:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True).copy_(table, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def wait(self) -> torch.Tensor:
        """The table on the host, once it has come: nothing that was queued after it is waited for."""
        if self._there is not None:
            self._there.synchronize()
        return self._table
