"""When a small table comes to a GPU beside chunks that are copied on another stream, with turns between and without.

    python3 tests/gpu/measure_small_tables.py [--rounds 5]

All layers of nine chunks of an 8B Llama's KV are asked for at once. Meanwhile the model's stream computes for some
milliseconds, is then asked for a table of a prompt's rows (184 KiB), for a kernel, and reads a result back. Prints one
JSON line each for a link that is idle, busy, and busy with turns (`kvstore/copy_turns.py`); times are medians, in
milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise

import torch
from hardware import mark

from kvstore import copy_turns
from kvstore.layer_copies import LayerCopies

LAYERS, CHUNKS = 32, 9
SHAPE = (2, 640, 8, 128)
WORK_CYCLES = 8_000_000
"""Of the GPU's clock: some four milliseconds."""
NO_TURNS = 1 << 60


class Copies:
    """All layers of all chunks, one layer at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        chunks = [torch.zeros(LAYERS, *SHAPE, dtype=torch.bfloat16, pin_memory=True) for _ in range(CHUNKS)]
        room = [torch.zeros(LAYERS, *SHAPE, dtype=torch.bfloat16, device="cuda") for _ in range(CHUNKS)]
        self._copies = LayerCopies(room, chunks, self._stream)

    def ask(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """For all of them; where they begin and end."""
        begin = mark(self._stream)
        for layer in range(LAYERS):
            self._copies.start(layer, layer, 1)
        return begin, mark(self._stream)


def measure(copies: Copies | None, rounds: int) -> dict[str, float]:
    """Milliseconds until the table is there, until the result is read back behind it, and of the copies."""
    table, onto = torch.zeros(23_040, dtype=torch.int64, pin_memory=True), torch.zeros(23_040, dtype=torch.int64).cuda()
    found, back = torch.zeros(5760, device="cuda"), torch.zeros(5760, pin_memory=True)
    runs = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        copied = (mark(), mark()) if copies is None else copies.ask()
        torch.cuda._sleep(WORK_CYCLES)
        marks = [mark()]
        onto.copy_(table, non_blocking=True)
        copy_turns.leave_copy_queue(onto.device)
        marks.append(mark())
        back.copy_(found, non_blocking=True)
        marks.append(mark())
        torch.cuda.synchronize()
        runs.append([*(a.elapsed_time(b) for a, b in pairwise(marks)), copied[0].elapsed_time(copied[1])])
    medians = (statistics.median(column) for column in zip(*runs[1:], strict=True))
    return dict(zip(("table_ms", "back_ms", "copies_ms"), medians, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    copies, usual = Copies(), copy_turns.TURN_BYTES
    for link, turn_bytes in (("idle", usual), ("busy", NO_TURNS), ("busy, with turns", usual)):
        copy_turns.TURN_BYTES = turn_bytes
        found = measure(None if link == "idle" else copies, rounds)
        print(json.dumps({"link": link, **found}), flush=True)


if __name__ == "__main__":
    main()
