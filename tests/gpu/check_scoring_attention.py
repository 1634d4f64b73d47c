"""Compares the kernels of the scoring attention with exact answers on a CUDA device, and times a layer's call.

    python tests/gpu/check_scoring_attention.py [--no-checks] [--sweep] [--out FILE.json]

Prints one JSON line a result, and writes all of them to `--out`; ends with 1 if a check failed. `--sweep` also times
other block sizes and cuts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cacheblend")]

from attention_mass_oracle import attention_with_mass, hidden_keys  # noqa: E402
from check_rows_attention import LAYERS, PEAK_BYTES, PEAK_FLOPS, REPEATS, launch_us, median_ms, poison  # noqa: E402
from scoring_attention_samples import ScoringCase, mass_error, scoring_case, worst_row  # noqa: E402

from cacheblend.kernels.row_tiles import TileConfig  # noqa: E402
from cacheblend.kernels.scoring_attention import ScoringPass, ScoringPlan, scoring_attention  # noqa: E402

WORST_ROW = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest relative error over the heads of any one row of the output."""
WORST_KEY = {torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
"""Largest relative error of any one key's mass."""
ATTEND = (
    TileConfig(128, 64, 8, 5),
    TileConfig(128, 64, 8, 3),
    TileConfig(128, 128, 8, 3),
    TileConfig(64, 64, 4, 5, resident=2),
    TileConfig(64, 64, 4, 3, resident=2),
)
TALLY = (
    TileConfig(128, 64, 4, 3),
    TileConfig(128, 64, 4, 2),
    TileConfig(128, 64, 8, 3),
    TileConfig(128, 128, 8, 3),
    TileConfig(64, 64, 4, 3),
    TileConfig(64, 128, 4, 2),
    TileConfig(256, 64, 8, 3),
)

results: list[dict[str, Any]] = []


def report(**fields: Any) -> None:
    """Print one line, and keep it for the file."""
    results.append(fields)
    print(json.dumps(fields), flush=True)


def llama_8b() -> dict[str, Any]:
    """Attention of an 8B Llama."""
    return {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}


def cases() -> list[dict[str, Any]]:
    """Arguments of `scoring_case`."""
    shapes = list(itertools.product((torch.bfloat16, torch.float32), (64, 128), (1, 4, 7)))
    layouts = ((16, "stacked"), (32, "packed"), (16, "apart"))
    sizes = ((1, 0, 1), (1, 777, 1), (64, 2048, 64), (37, 1500, 240), (100, 63, 100), (65, 1025, 66))
    # Each shape compiles kernels of its own for several seconds: twelve, which take turns with layouts and sizes.
    found = [
        {"dtype": dtype, "head_dim": dim, "heads": 2 * group, "block_size": block, "layout": layout}
        | {"rows": rows, "context": context, "own": own}
        for i, (dtype, dim, group) in enumerate(shapes)
        for block, layout in [layouts[(i + i // 3) % 3]]
        for rows, context, own in [sizes[(i + i // 6) % 6]]
    ]
    odd = {"rows": 50, "context": 900, "own": 70}
    found += [
        {**odd, "head_dim": 80, "heads": 6, "layout": "packed", "dtype": torch.bfloat16},
        {**odd, "head_dim": 80, "heads": 6, "dtype": torch.float32},
        {**odd, "head_dim": 256, "heads": 8, "layout": "packed", "dtype": torch.bfloat16},
        {**odd, "head_dim": 256, "heads": 8, "dtype": torch.float32},
        {**odd, "head_dim": 128, "heads": 14, "dtype": torch.float16},
        {**odd, "head_dim": 16, "heads": 4, "dtype": torch.float32},
        {**odd, "head_dim": 128, "heads": 8, "block_size": 24, "dtype": torch.bfloat16},
        {**odd, "head_dim": 128, "heads": 142, "dtype": torch.bfloat16},
        {**llama_8b(), "rows": 64, "context": 5888, "own": 64},
        {**llama_8b(), "rows": 128, "context": 6000, "own": 128},
        {**llama_8b(), "rows": 512, "context": 12000, "own": 700},
        {**llama_8b(), "rows": 2000, "context": 3000, "own": 2000},
        {**llama_8b(), "rows": 64, "context": 5888, "own": 64, "dtype": torch.float32},
    ]
    return [{**arguments, "device": "cuda", "seed": i} for i, arguments in enumerate(found)]


def check_case(arguments: dict[str, Any], **changes: Any) -> bool:
    """Whether output and mass are exact within rounding, and a second call gives the same bits."""
    case = scoring_case(**arguments)
    plan = replace(case.plan, **changes)
    tally = case.no_mass()
    poison(case.query.shape, case.query.dtype)
    poison((plan.parts, plan.kv_heads, plan.vectors, plan.head_dim), torch.float32)
    got = scoring_attention(*case.arguments(tally, plan))
    once = tally.clone()
    alike = torch.equal(got, scoring_attention(*case.arguments(tally, plan))) and torch.equal(tally, 2 * once)
    out, mass = case.exact()
    row, key = worst_row(got, out), mass_error(once, mass)
    dtype = case.query.dtype
    passed = row <= WORST_ROW[dtype] and key <= WORST_KEY[dtype] and alike
    named = {name: str(value) for name, value in arguments.items() if name not in ("device", "seed")}
    report(check="exact", passed=passed, worst_row=row, worst_key=key, alike=alike, parts=plan.parts, **named)
    return passed


def check_pass() -> bool:
    """Whether layers of a pass give the bits of a call alone, also where a tensor begins at another address."""
    case = scoring_case(100, 3000, **llama_8b())
    alone, together = case.no_mass(), case.no_mass()
    scoring = ScoringPass(case.block_table, together, case.plan)
    alike = []
    for turn in range(6):
        query = case.query.roll(turn, 0)
        if turn in (2, 3):
            # Not a multiple of 16: the binary of the layers before does not fit.
            query = torch.cat([query.flatten()[:1], query.flatten()])[1:].view(query.shape)
        layer = replace(case, query=query, own_keys=case.own_keys.roll(turn, 0))
        out = torch.full_like(query, torch.nan)
        scoring.attend(layer.query, layer.own_keys, layer.own_values, layer.layer, layer.scale, out)
        alike.append(torch.equal(out, scoring_attention(*layer.arguments(alone))))
    passed = all(alike) and torch.equal(alone, together)
    report(check="layers of a pass give the bits of calls alone", passed=passed)
    return passed


class Before:
    """The same layer in PyTorch: read the pages, append the own KV, attend, add to the tally."""

    def __init__(self, case: ScoringCase) -> None:
        self._case = case
        self._slots = torch.arange(case.plan.context, device="cuda")
        self._blocks = case.block_table.long()[self._slots // case.layer.block_size]
        self._offsets = self._slots % case.layer.block_size
        self._positions = case.positions()
        self._hidden = hidden_keys(self._positions, case.plan.context + case.plan.own)
        self._tally = torch.zeros(case.plan.context, device="cuda")

    def __call__(self) -> torch.Tensor:
        """One layer."""
        case = self._case
        keys = torch.cat([case.layer.keys[self._blocks, self._offsets], case.own_keys])
        values = torch.cat([case.layer.values[self._blocks, self._offsets], case.own_values])
        out, mass = attention_with_mass(case.query, keys, values, self._positions, case.scale, self._hidden)
        self._tally += mass[: len(self._tally)]
        return out


def kernel_us(call: Callable[[int], Any]) -> dict[str, float]:
    """Mean time of each of our kernels in a call, as the profiler sees it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for repeat in range(REPEATS):
            call(repeat % LAYERS)
        torch.cuda.synchronize()
    found = {event.key: event.device_time_total / REPEATS for event in profile.key_averages()}
    return {name: round(us, 1) for name, us in found.items() if name.endswith("_kernel")}


def time_question(rows: int, context: int) -> None:
    """Time a question's layer, each of several layers with pages of its own, beside the way before and the floors."""
    layers = [scoring_case(rows, context, **llama_8b(), seed=seed) for seed in range(LAYERS)]
    before = [Before(case) for case in layers]
    tally, plan = layers[0].no_mass(), layers[0].plan

    call = _calls(layers, tally, plan)
    keys = plan.context + plan.own
    products = 2 * plan.heads * plan.head_dim * rows
    flops = 2 * products * keys + products * context
    pages = 2 * plan.kv_heads * plan.head_dim * 2 * keys
    report(
        time="scoring attention",
        rows=rows,
        context=context,
        ms=median_ms(call),
        before_ms=median_ms(lambda layer: before[layer]()),
        launch_us=launch_us(call),
        alone_launch_us=launch_us(lambda layer: scoring_attention(*layers[layer].arguments(tally, plan))),
        before_launch_us=launch_us(lambda layer: before[layer]()),
        kernels_us=kernel_us(call),
        floor_flops_ms=round(flops / PEAK_FLOPS * 1e3, 4),
        floor_bytes_ms=round(pages / PEAK_BYTES * 1e3, 4),
        parts=plan.parts,
    )


def time_plan() -> None:
    """What a pass pays once."""
    sizes = {name: value for name, value in llama_8b().items() if name not in ("block_size", "device")}
    device = torch.device("cuda")
    took = launch_us(lambda _: ScoringPlan.of(rows=128, own=128, context=6000, device=device, **sizes))
    report(time="plan", us=took)


def sweep(rows: int, context: int) -> list[bool]:
    """Check and time other block sizes and cuts; one that does not fit the device is reported and passed over."""
    layers = [scoring_case(rows, context, **llama_8b(), seed=seed) for seed in range(LAYERS)]
    plan, tally = layers[0].plan, layers[0].no_mass()
    others = [{"attend": config} for config in ATTEND] + [{"tally": config} for config in TALLY]
    others += [{"parts": parts} for parts in sorted({max(1, plan.parts // 2), plan.parts, 2 * plan.parts})]
    passed = []
    for changes in others:
        try:
            passed.append(check_case({**llama_8b(), "rows": rows, "context": context}, **changes))
            changed = replace(plan, **changes)
            call = _calls(layers, tally, changed)
            report(sweep=str(changes), rows=rows, context=context, ms=median_ms(call), kernels_us=kernel_us(call))
        except Exception as error:
            report(sweep=str(changes), error=f"{type(error).__name__}: {error}"[:300])
    return passed


def _calls(layers: list[ScoringCase], tally: torch.Tensor, plan: ScoringPlan) -> Callable[[int], torch.Tensor]:
    """The layers of a pass, each with pages of its own; all take the first one's table, for a pass has one."""
    scoring, out = ScoringPass(layers[0].block_table, tally, plan), torch.empty_like(layers[0].query)

    def call(layer: int) -> torch.Tensor:
        case = layers[layer]
        scoring.attend(case.query, case.own_keys, case.own_values, case.layer, case.scale, out)
        return out

    return call


def main() -> int:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also time other block sizes and cuts")
    parser.add_argument("--no-checks", action="store_true", help="time only")
    parser.add_argument("--out", type=Path, help="file for all results as one JSON list")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    import triton

    report(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    passed = [] if options.no_checks else [*map(check_case, cases()), check_pass()]
    for rows, context in itertools.product((64, 128, 512), (5888, 12000)):
        time_question(rows, context)
    time_plan()
    if options.sweep:
        passed += sweep(128, 5888)
    report(passed=sum(passed), failed=len(passed) - sum(passed))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
