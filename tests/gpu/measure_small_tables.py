"""When a small table comes to a GPU beside chunks that are copied on another stream.

    python3 tests/gpu/measure_small_tables.py [--rounds 5]

Nine chunks of an 8B Llama's KV are copied in groups of four layers through a ring of two groups, while the model's
stream computes for some milliseconds, is then asked for a table of a prompt's rows (184 KiB), and reads a result back.
A group is asked for when its room is free, or only when the one before it is there. Prints one JSON line each; times
are medians, in milliseconds. What it tells is why `cacheblend/vllm_backend/placement.py` holds copies back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from hardware import mark

from kvstore.layer_copies import LayerCopies

LAYERS, GROUP, CHUNKS = 32, 4, 9
SHAPE = (2, 640, 8, 128)
WORK_CYCLES = 8_000_000
"""Of the GPU's clock: some four milliseconds."""


class Copies:
    """The groups of all chunks, asked for one after another.

    Args:
        outstanding: groups asked for and not there yet, at most.
    """

    def __init__(self, outstanding: int) -> None:
        self._outstanding = outstanding
        self._stream = torch.cuda.Stream()
        chunks = [torch.zeros(LAYERS, *SHAPE, dtype=torch.bfloat16, pin_memory=True) for _ in range(CHUNKS)]
        rings = [torch.zeros(2 * GROUP, *SHAPE, dtype=torch.bfloat16, device="cuda") for _ in range(CHUNKS)]
        self._copies = LayerCopies(rings, chunks, self._stream)
        self._arrived: list[Any] = []

    def begin(self) -> None:
        self._arrived = []

    def advance(self) -> bool:
        """Ask for the next groups, as many as may be outstanding; whether any are left to ask for."""
        while (number := len(self._arrived)) < LAYERS // GROUP:
            if number >= self._outstanding and not self._arrived[-self._outstanding].query():
                return True
            self._copies.start(number % 2 * GROUP, number * GROUP, GROUP)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._arrived.append(event)
        return False


def measure(copies: Copies | None, rounds: int) -> dict[str, float]:
    """Milliseconds until the table is there, and until the result is read back behind it."""
    table, onto = torch.zeros(23_040, dtype=torch.int64, pin_memory=True), torch.zeros(23_040, dtype=torch.int64).cuda()
    found, back = torch.zeros(5760, device="cuda"), torch.zeros(5760, pin_memory=True)
    runs = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        if copies is not None:
            copies.begin()
            copies.advance()
        torch.cuda._sleep(WORK_CYCLES)
        marks = [mark()]
        onto.copy_(table, non_blocking=True)
        marks.append(mark())
        back.copy_(found, non_blocking=True)
        marks.append(mark())
        more = True
        while more or not marks[-1].query():
            more = copies is not None and copies.advance()
            time.sleep(5e-5)
        torch.cuda.synchronize()
        runs.append([a.elapsed_time(b) for a, b in pairwise(marks)])
    table_ms, back_ms = (statistics.median(column) for column in zip(*runs[1:], strict=True))
    return {"table_ms": table_ms, "back_ms": back_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for outstanding in (0, 1, 2):
        copies = Copies(outstanding) if outstanding else None
        print(json.dumps({"groups_outstanding": outstanding, **measure(copies, rounds)}), flush=True)


if __name__ == "__main__":
    main()
