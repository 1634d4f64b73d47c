"""Compares the kernel of `kv_deviation` with the definition on a CUDA device, and times it beside its floor.

    python tests/gpu/check_kv_deviation.py

Prints one JSON line a result; ends with 1 if a comparison failed.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cacheblend")]

from check_rows_attention import PEAK_BYTES, launch_us, median_ms, poison, report  # noqa: E402
from kv_deviation_samples import by_definition, deviation_case  # noqa: E402

from cacheblend.kernels.kv_deviation import kv_deviation, squared_distance  # noqa: E402

ROWS = 5824


def check(rows: int, kv_heads: int, head_dim: int, layout: str, dtype: torch.dtype) -> bool:
    """Whether every row is right, gets the same bits again, and the same without the rows before it."""
    keys, values, layer, slots = deviation_case(rows, kv_heads, head_dim, 16, layout, dtype, "cuda")
    poison(slots.shape, torch.float32)
    got = kv_deviation(keys, values, layer, slots)
    exact = by_definition(keys, values, layer, slots)
    error = float(((got.double() - exact).abs() / exact).max())
    # The slots of the second row on begin at no multiple of 16.
    alike = torch.equal(got, kv_deviation(keys, values, layer, slots))
    alike &= torch.equal(got[1:], kv_deviation(keys[1:], values[1:], layer, slots[1:]))
    passed = error <= 1e-5 and alike
    shape = {"rows": rows, "kv_heads": kv_heads, "head_dim": head_dim, "layout": layout, "dtype": str(dtype)}
    report(check="kv deviation", passed=passed, error=error, alike=alike, **shape)
    return passed


def time_rows() -> None:
    """Time all rows of a prompt of an 8B Llama, beside PyTorch and the floor."""
    keys, values, layer, slots = deviation_case(ROWS, 8, 128, 16, "stacked", torch.bfloat16, "cuda")
    blocks, offsets = slots // 16, slots % 16

    def in_torch() -> torch.Tensor:
        return squared_distance((keys, values), (layer.keys[blocks, offsets], layer.values[blocks, offsets]))

    report(
        time="kv deviation",
        rows=ROWS,
        ms=median_ms(lambda _: kv_deviation(keys, values, layer, slots)),
        torch_ms=median_ms(lambda _: in_torch()),
        launch_us=launch_us(lambda _: kv_deviation(keys, values, layer, slots)),
        floor_bytes_ms=round(4 * keys.numel() * keys.element_size() / PEAK_BYTES * 1e3, 4),
    )


def main() -> int:
    """Check, then time."""
    shapes = itertools.product(
        (1, 67),
        (1, 8, 10),
        (64, 80, 128),
        ("stacked", "packed", "apart"),
        (torch.bfloat16, torch.float16, torch.float32),
    )
    passed = [check(*shape) for shape in shapes]
    time_rows()
    report(passed=sum(passed), failed=len(passed) - sum(passed))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
