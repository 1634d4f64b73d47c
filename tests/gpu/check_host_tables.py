"""Checks on a CUDA device that tables come from the host as they were, and before copies that were asked for earlier.

    python tests/gpu/check_host_tables.py

Prints one JSON line a result; ends with 1 if a table was not as it was. When it came is reported, and decides nothing.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from check_rows_attention import launch_us, report  # noqa: E402

from cacheblend.kernels.host_tables import empty_table, on_device  # noqa: E402

DEVICE = torch.device("cuda")
ROUNDS, MIB = 500, 1 << 20


def check() -> bool:
    """Tables of many sizes, each let go of at once, so that its memory is soon another's."""
    sums, expected = [], []
    for seed in range(ROUNDS):
        table = empty_table(1 + seed * 37 % 5000, device=DEVICE).random_(0, 1 << 40)
        expected.append(int(table.sum()))
        sums.append(on_device(table, DEVICE).sum())
    pageable = torch.arange(3001, dtype=torch.int32)
    passed = [int(total) for total in sums] == expected and torch.equal(on_device(pageable, DEVICE).cpu(), pageable)
    report(check="host tables", passed=passed, tables=ROUNDS)
    return passed


def time_behind(copy_mib: int = 128) -> None:
    """When a table of a prompt's rows is there that was asked for behind a large copy on another stream."""
    large = torch.empty(copy_mib * MIB, dtype=torch.uint8, pin_memory=True)
    target, stream = torch.empty_like(large, device=DEVICE), torch.cuda.Stream()
    table = empty_table(8, 5760, device=DEVICE).zero_()
    ways = {
        "kernel": lambda: on_device(table, DEVICE),
        "copy": lambda: table.to(DEVICE, non_blocking=True),
    }
    for name, bring in ways.items():
        waits = []
        for _ in range(20):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                target.copy_(large, non_blocking=True)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            bring()
            after.record()
            torch.cuda.synchronize()
            waits.append(before.elapsed_time(after))
        report(time=f"table by {name}, behind {copy_mib} MiB", ms=round(statistics.median(waits[3:]), 3))
        torch.cuda.synchronize()
        report(time=f"table by {name}, on the host", launch_us=launch_us(lambda _: bring()))  # noqa: B023


def main() -> int:
    """Check, then time."""
    passed = check()
    time_behind()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
