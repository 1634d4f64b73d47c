"""Compares the kernels of `DriftPass` with the definition on a CUDA device, and times them beside their floor.

    python tests/gpu/check_carry_drift.py

Prints one JSON line a result; ends with 1 if a comparison failed.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cacheblend")]

from carry_drift_samples import by_definition, by_twin, drift_case  # noqa: E402
from check_rows_attention import PEAK_BYTES, launch_us, median_ms, report  # noqa: E402

from cacheblend.kernels.carry_drift import DriftPass  # noqa: E402

CHUNKS = ((640, 96),) * 9
"""Nine chunks of an 8B Llama's prompt, 15 % recomputed."""
WORST = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest |kernel - definition| over the largest |definition|: the last step of the pages' dtype, but for float32."""


def check(kv_heads: int, head_dim: int, layout: str, dtype: torch.dtype, more: int) -> bool:
    """Whether every row moves to where it should, and a chunk's to the same bits without the other chunks."""
    chunks = ((100, 13), (31, 2), (70, 60))
    case, on_host = (
        drift_case(chunks, kv_heads, head_dim, 16, layout, dtype, device, more) for device in ("cuda", "cpu")
    )
    # Row after row on the host, where no step waits for a device.
    exact, apart = by_definition(on_host), by_twin(case)
    DriftPass(case.rows, case.rotations).move(case.keys, case.values, case.layer, case.more)
    moved = case.stored(case.rows.left_slots)
    error, twin = (
        max(
            float((m.cpu().double() - e.cpu().double()).abs().max() / e.abs().max())
            for m, e in zip(moved, other, strict=True)
        )
        for other in (exact, apart)
    )
    passed = max(error, twin) <= WORST[dtype]
    report(
        check="carry drift", passed=passed, error=error, beside_twin=twin,
        kv_heads=kv_heads, head_dim=head_dim, layout=layout, dtype=str(dtype), more=more,
    )  # fmt: skip
    return passed


def check_alone() -> bool:
    """Whether a chunk's rows get the same bits whatever chunks are beside it."""
    shape = (8, 128, 16, "stacked", torch.bfloat16, "cuda")
    together, again = (drift_case(((300, 45), (100, 20)), *shape) for _ in range(2))
    for case in (together, again):
        rows = case.rows
        if case is again:
            first = rows.tiles[:, 3] <= rows.chunks[0].told_end
            rows = replace(rows, tiles=rows.tiles[first].contiguous())
        DriftPass(rows, case.rotations).move(case.keys, case.values, case.layer)
    own = together.rows.left_slots[: together.rows.chunks[0].left_end]
    passed = all(torch.equal(a, b) for a, b in zip(together.stored(own), again.stored(own), strict=True))
    report(check="carry drift, a chunk alone", passed=passed)
    return passed


def time_rows() -> None:
    """Time one layer of a prompt of an 8B Llama, beside PyTorch and the floor."""
    case = drift_case(CHUNKS, 8, 128, 16, "stacked", torch.bfloat16, "cuda")
    drift = DriftPass(case.rows, case.rotations)
    told, left = len(case.rows.of_pass), len(case.rows.left_slots)
    row_bytes = 2 * 8 * 128 * 2
    report(
        time="carry drift",
        told=told,
        left=left,
        ms=median_ms(lambda _: drift.move(case.keys, case.values, case.layer)),
        torch_ms=median_ms(lambda _: by_twin(case)),
        launch_us=launch_us(lambda _: drift.move(case.keys, case.values, case.layer)),
        floor_bytes_ms=round(2 * (told + left) * row_bytes / PEAK_BYTES * 1e3, 4),
    )


def main() -> int:
    """Check, then time."""
    shapes = itertools.product(
        (1, 8),
        (64, 80, 128),
        ("stacked", "packed", "apart"),
        (torch.bfloat16, torch.float16, torch.float32),
        (0, 2),
    )
    passed = [check_alone(), *(check(*shape) for shape in shapes)]
    time_rows()
    report(passed=sum(passed), failed=len(passed) - sum(passed))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
