"""Compares the kernel for scattered rows with its twin on a CUDA device, and times it beside its floor.

    python tests/gpu/check_rows_attention.py [--sweep] [--no-checks]

Prints one JSON line a result; ends with 1 if a comparison failed. `--sweep` also times other block sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cacheblend")]

from attention_mass_oracle import attention_with_mass  # noqa: E402
from rows_attention_samples import RowsCase, rows_case  # noqa: E402

from cacheblend.kernels.pages import PagedLayer  # noqa: E402
from cacheblend.kernels.row_tiles import RowTiles, TileConfig  # noqa: E402
from cacheblend.kernels.rows_attention import RowsAttentionPass, rows_attention  # noqa: E402
from cacheblend.kernels.rows_attention_torch import attend_rows_torch  # noqa: E402

WORST_ROW = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest |kernel - twin| / |twin| over the heads of any one row."""
CONTEXT, ROWS, LAYERS, REPEATS = 5888, 883, 4, 50
PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12
"""Matrix products and copies as measured on an H200."""
CONFIGS = (
    TileConfig(128, 64, 8, 5),
    TileConfig(128, 128, 8, 5),
    TileConfig(128, 128, 8, 3),
    TileConfig(128, 64, 8, 3, resident=2),
    TileConfig(128, 32, 8, 5, resident=2),
    TileConfig(128, 64, 8, 7),
    TileConfig(64, 64, 4, 3, resident=2),
    TileConfig(64, 128, 4, 3),
)


def report(**fields: Any) -> None:
    """Print one line."""
    print(json.dumps(fields), flush=True)


def some(count: int, reach: int, seed: int) -> list[int]:
    """Random distinct positions in order."""
    return sorted(random.Random(seed).sample(range(reach), count))


def ragged(seed: int) -> list[list[int]]:
    """Requests of unlike lengths: dense, scattered, empty, a single token, a head of each chunk, few in a long one."""
    heads = [start + i for start in range(64, 2000, 640) for i in range(16)]
    return [list(range(200)), some(150, 1500, seed), [], [0], heads, some(20, 4000 + seed, seed + 1)]


def cases() -> list[dict]:
    """Arguments of `rows_case`."""
    shapes = itertools.product((64, 128), (1, 4, 8), (16, 32), ("stacked", "packed"))
    found = [
        {"head_dim": dim, "heads": 2 * group, "block_size": size, "layout": layout, "dtype": torch.bfloat16}
        for dim, group, size, layout in shapes
    ]
    exact = itertools.product((64, 128), ((1, 16, "packed"), (4, 32, "stacked"), (8, 16, "stacked"), (4, 16, "apart")))
    found += [
        {"head_dim": dim, "heads": 2 * group, "block_size": size, "layout": layout, "dtype": torch.float32}
        for dim, (group, size, layout) in exact
    ]
    found += [
        {"head_dim": 128, "heads": 14, "dtype": torch.float16, "position_dtype": torch.int64},
        {"head_dim": 80, "heads": 6, "layout": "packed", "dtype": torch.bfloat16},
        {"head_dim": 256, "heads": 8, "layout": "packed", "dtype": torch.bfloat16},
        {"head_dim": 256, "heads": 8, "dtype": torch.float32},
        {"head_dim": 128, "heads": 8, "block_size": 24, "dtype": torch.bfloat16},
        {"head_dim": 128, "heads": 8, "block_size": 256, "dtype": torch.bfloat16},
    ]
    return [{**arguments, "rows": ragged(i), "seed": i} for i, arguments in enumerate(found)]


def tiles_of(case: RowsCase, config: TileConfig | None = None) -> RowTiles:
    """From the case's rows on the host."""
    return RowTiles.of(case.row_requests.cpu(), case.positions.cpu(), **case.heads(), config=config)


def in_float32(case: RowsCase) -> torch.Tensor:
    """The twin's answer on the same numbers."""
    wide = PagedLayer(case.layer.keys.float(), case.layer.values.float())
    rest = (case.block_tables, case.row_requests, case.positions, case.scale)
    return attend_rows_torch(case.query.float(), wide, *rest)


def poison(shape: torch.Size, dtype: torch.dtype) -> None:
    """Leave NaN where the next result will probably be allocated, so that a row never written is seen."""
    torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def worst_row(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the worst row; NaN if there is one."""
    apart = (got.float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(apart.max())


def check_case(arguments: dict, config: TileConfig | None = None) -> bool:
    """Whether the kernel equals its twin there, with tiles made before and within the call."""
    case = rows_case(**arguments, device="cuda")
    expected = in_float32(case)
    tiles = tiles_of(case, config)
    poison(case.query.shape, case.query.dtype)
    began = time.perf_counter()
    got = rows_attention(*case.arguments(), tiles)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    error = worst_row(got, expected)
    alike = config is not None or torch.equal(got, rows_attention(*case.arguments()))
    passed = error <= WORST_ROW[case.query.dtype] and alike
    named = {k: str(v) for k, v in arguments.items() if k != "rows"}
    report(check="kernel", passed=passed, worst_row=error, parts=tiles.parts, first_call_s=round(seconds, 2), **named)
    return passed


def check_batch() -> bool:
    """Whether a request gets the same bits alone and beside others."""
    rows = [some(64, 5000, 7), some(500, 6000, 8), [3]]
    case = rows_case(rows, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    together = rows_attention(*case.arguments())
    alone = rows_attention(
        case.query[:64],
        case.layer.keys,
        case.layer.values,
        case.block_tables[:1],
        case.row_requests[:64],
        case.positions[:64],
        case.scale,
    )
    passed = torch.equal(together[:64], alone)
    report(check="alone and in a batch give the same bits", passed=passed)
    return passed


def check_pass() -> bool:
    """Whether layers of a pass give the bits of a call alone, also where a tensor begins at another address."""
    passed = True
    for rows in (some(500, 6000, 8), [5000, 5500, 5999]):
        case = rows_case([rows], **timed_shape(), device="cuda")
        attention = pass_of(case)
        for turn in range(6):
            query = case.query.roll(turn, 0)
            if turn in (2, 3):
                # Not a multiple of 16: the binary of the layers before does not fit.
                query = torch.cat([query.flatten()[:1], query.flatten()])[1:].view(query.shape)
            out = torch.full_like(query, torch.nan)
            attention.attend(query, case.layer, case.scale, out)
            passed &= torch.equal(out, rows_attention(query, *case.arguments()[1:]))
    report(check="layers of a pass give the bits of calls alone", passed=passed)
    return passed


def pass_of(case: RowsCase) -> RowsAttentionPass:
    """A pass over the case's rows."""
    on_host = (case.row_requests.cpu(), case.positions.cpu())
    return RowsAttentionPass(case.block_tables, case.row_requests, case.positions, *on_host)


def check_mass() -> bool:
    """Whether bfloat16 output and mass of a scoring pass are float32's, and how long it takes."""
    case = rows_case([list(range(CONTEXT - 64, CONTEXT))], **timed_shape(), device="cuda")
    keys, values = case.layer.gather(case.block_tables[0], CONTEXT)
    arguments = (case.query, keys, values, case.positions)
    out, mass = attention_with_mass(*arguments, case.scale)
    exact_out, exact_mass = attention_with_mass(*(t.float() for t in arguments[:3]), case.positions, case.scale)
    error = worst_row(out, exact_out)
    mass_error = float((mass - exact_mass).norm() / exact_mass.norm())
    passed = error <= 2e-2 and mass_error <= 1e-4
    timed = median_ms(lambda _: attention_with_mass(*arguments, case.scale))
    report(check="mass", passed=passed, worst_row=error, mass_error=mass_error, ms=timed, rows=64, context=CONTEXT)
    return passed


def timed_shape() -> dict:
    """Attention of an 8B Llama."""
    return {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16, "dtype": torch.bfloat16}


def median_ms(call: Callable[[int], Any]) -> float:
    """Median time of a call on the device; the calls queue up behind a pause, so that launching them takes no part."""
    for layer in range(2 * LAYERS):
        call(layer % LAYERS)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    torch.cuda.synchronize()
    torch.cuda._sleep(60_000_000)
    for repeat, (before, after) in enumerate(events):
        before.record()
        call(repeat % LAYERS)
        after.record()
    torch.cuda.synchronize()
    return round(statistics.median(before.elapsed_time(after) for before, after in events), 4)


def launch_us(call: Callable[[int], Any]) -> float:
    """Time of a call on the host, without waiting for the device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for repeat in range(REPEATS):
        call(repeat % LAYERS)
    seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    return round(seconds / REPEATS * 1e6, 1)


def time_rows(name: str, rows: list[list[int]], config: TileConfig | None = None) -> None:
    """Time a pass over several layers, each with pages of its own, as a model would do it."""
    layers = [rows_case(rows, **timed_shape(), seed=seed, device="cuda") for seed in range(LAYERS)]
    tiles = tiles_of(layers[0], config)

    def call(layer: int) -> torch.Tensor:
        return rows_attention(*layers[layer].arguments(), tiles)

    attention, out = pass_of(layers[0]), torch.empty_like(layers[0].query)

    def in_pass(layer: int) -> None:
        attention.attend(layers[layer].query, layers[layer].layer, layers[layer].scale, out)

    ms = median_ms(call)
    heads, dim = layers[0].query.shape[1:]
    flops = 4 * heads * dim * sum(place + 1 for places in rows for place in places)
    pages = 2 * layers[0].layer.kv_heads * dim * 2 * sum(places[-1] + 1 for places in rows)
    bytes_moved = pages + 2 * layers[0].query.numel() * 2
    report(
        time=name,
        rows=sum(map(len, rows)),
        ms=ms,
        tflops=round(flops / ms / 1e9, 1),
        floor_flops_ms=round(flops / PEAK_FLOPS * 1e3, 4),
        floor_bytes_ms=round(bytes_moved / PEAK_BYTES * 1e3, 4),
        programs=len(tiles.work) * layers[0].layer.kv_heads,
        parts=tiles.parts,
        launch_us=launch_us(call),
        pass_launch_us=launch_us(in_pass),
        config=str(tiles.config),
    )


def time_prefill() -> None:
    """What the attention of a whole prefill takes in PyTorch, to compare with."""
    heads, kv_heads, dim = 32, 8, 128
    query = torch.randn(1, heads, CONTEXT, dim, dtype=torch.bfloat16, device="cuda")
    keys, values = torch.randn(2, 1, kv_heads, CONTEXT, dim, dtype=torch.bfloat16, device="cuda")
    attend = torch.nn.functional.scaled_dot_product_attention
    ms = median_ms(lambda _: attend(query, keys, values, is_causal=True, enable_gqa=True))
    report(time="whole prefill, scaled_dot_product_attention", rows=CONTEXT, ms=ms)


def sweep(rows: list[list[int]]) -> list[bool]:
    """Check and time other block sizes; one that does not fit the device is reported and passed over."""
    passed = []
    for config in CONFIGS:
        try:
            passed.append(check_case({"rows": ragged(50), **timed_shape()}, config))
            time_rows("sweep", rows, config)
        except Exception as error:
            report(sweep=str(config), error=f"{type(error).__name__}: {error}"[:300])
    return passed


def main() -> int:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also time other block sizes")
    parser.add_argument("--no-checks", action="store_true", help="time only")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    import triton

    report(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    passed: list[bool] = []
    if not options.no_checks:
        passed += [check_case(arguments) for arguments in cases()]
        passed += [check_batch(), check_pass(), check_mass()]
    rows = some(ROWS, CONTEXT, 0)
    time_rows("883 of 5888", [rows])
    time_rows("three requests of 883 of 5888", [some(ROWS, CONTEXT, seed) for seed in range(3)])
    time_rows("64 of 5888", [some(64, CONTEXT, 3)])
    time_rows("the last 64 of 5888", [list(range(CONTEXT - 64, CONTEXT))])
    time_prefill()
    if options.sweep:
        passed += sweep([rows])
    report(passed=sum(passed), failed=len(passed) - sum(passed))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
