"""Small tables of the host's on a GPU, past the copies of chunk KV that are on their way.

A GPU copies from the host with one engine, in the order in which copies were asked for, whatever their streams: a table
asked for behind a hundred megabytes of KV comes milliseconds later, and with it all that needs it. A kernel reads
page-locked memory by itself, beside that engine.
"""

from __future__ import annotations

from collections import deque

import torch

_being_read: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
"""Tables that kernels may still read: PyTorch knows of copies only, and would hand the memory out again."""


def empty_table(*shape: int, device: torch.device) -> torch.Tensor:
    """[*shape] int64 on the host, to be filled and brought to `device`: page-locked where that is a GPU."""
    return torch.empty(*shape, dtype=torch.int64, pin_memory=device.type == "cuda")


def on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of `table` on `device`, for what is queued on the current stream afterwards.

    Args:
        table: contiguous, on the host; not to be changed any more. Best page-locked where `device` is a GPU; a copy
            of it is made so otherwise.
        device: of the model.
    """
    if device.type != "cuda":
        return table.to(device)
    # Here, for triton is not installed where there is no GPU.
    from cacheblend.kernels.host_tables_triton import read_table

    while _being_read and _being_read[0][0].query():
        _being_read.popleft()
    table = table.pin_memory()
    placed = torch.empty_like(table, device=device, pin_memory=False)
    read_table(table, placed)
    event = torch.cuda.Event()
    event.record()
    _being_read.append((event, table))
    return placed
