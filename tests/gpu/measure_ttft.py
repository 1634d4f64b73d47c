"""Time to first token on a GPU: full prefill against blended arms, interleaved in one run; and decoding beside them.

    python3 tests/gpu/measure_ttft.py --out FILE.json [--rounds 20] [--chunks 9] [--prefix-caching] [--commit HASH]

64 system tokens, chunks of 640 and 64 of a question; one request at a time, from its submission to its first token.
In every round the chunks are on the host with the GPU pool closed, and in the pool; each account's bytes by tier say
from where they came, and an arm whose bytes came from elsewhere has failed. Plain requests of several lengths and
copies measure the parts of each arm's floor in the same run; `eval/speed/floor.py` states the formulas, and the
result repeats them:

    reuse                  max(load, pass(system)) + step
    chunk_head             max(load, pass(system + recomputed)) + step
    deviation              max(load, 2/L full + (1 - 2/L) pass(system + recomputed)) + step
    query                  load + pass(system + question) + pass(recomputed) + step
    from the GPU pool      the same with load = 0
    pass(rows)             max(weights, rows x slope), and nothing for no rows

load: the chunks' bytes over the rate of one large page-locked copy; weights: bytes of all layers' weights over the
rate of a large copy on the device, read and written bytes counted; slope: of the line through full prefills of 2,048,
3,072 and 4,096 tokens, which keep the device busy (shorter ones wait for the host, and 512 take as long as 1,024: a
line through them would say more than the device's peak); step: a plain request of 64 tokens; full: full prefill of
the prompt; L: layers.

With `--prefix-caching`, as vLLM is usually run, blended arms find the system prompt in vLLM's prefix cache, and floors
have no system rows; full prefill is salted and finds nothing.

Then eight requests decode while others arrive, and the time between their tokens is reported with arrivals prefilled
whole, blended, and without arrivals.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_8b
from blend_prompts import ARMS, CHUNK, QUESTION, SYSTEM, Prompts, collect, first_token, plain_first_token, sampling
from hardware import at, described, device_gb_s, link_gb_s
from swap_bench import Bench

from eval.speed.floor import PASS_FORMULA, ArmWork, MeasuredParts, floor_of, layer_weight_bytes, recomputed_rows
from eval.speed.interleaved import Run, Setting, Taken, interleave
from eval.speed.lines import fit_line

CONFIG: dict[str, Any] = llama_8b.CONFIG
FROM_POOL = ("reuse", "chunk_head 108", "deviation 15 %", "query 15 %", "query 15 %, drift")
POOL = ", GPU pool"
LENGTHS = (2048, 3072, 4096)
BARS = {
    "over_floor": {"required": 1.35, "aim": 1.15},
    "share_of_full": {
        "reuse": {"required": 0.17, "aim": 0.15},
        "chunk_head 16": {"required": 0.20, "aim": 0.16},
        "deviation 15 %": {"required": 0.30, "aim": 0.24},
        "query 15 %": {"required": 0.34, "aim": 0.27},
        "query 15 %, drift": {"required": 0.34, "aim": 0.27},
        f"chunk_head 108{POOL}": {"required": 0.26, "aim": 0.21},
        f"deviation 15 %{POOL}": {"required": 0.26, "aim": 0.21},
        f"query 15 %{POOL}": {"required": 0.26, "aim": 0.21},
        f"query 15 %, drift{POOL}": {"required": 0.26, "aim": 0.21},
    },
}


def arm_once(llm: Any, prompts: Prompts, name: str) -> tuple[float, dict[str, Any]]:
    """One request of an arm, and its account, which must say what the arm's name says."""
    arm, tier = (name.removesuffix(POOL), "gpu") if name.endswith(POOL) else (name, "host")
    milliseconds, account = first_token(llm, prompts, ARMS[arm])
    expected = ("full", set()) if arm == "full" else ("blend", {tier})
    loaded = {place for place, count in account["bytes_loaded"].items() if count}
    if (account["mode"], loaded) != expected:
        raise RuntimeError(f"{name} was served otherwise: {account}")
    return milliseconds, account


def settings_of(llm: Any, bench: Any, prompts: Prompts) -> list[Setting]:
    """What runs with the chunks on the host, and what with the chunks in the pool."""

    def arm(name: str) -> Run:
        return lambda: arm_once(llm, prompts, name)

    def plain(length: int) -> Run:
        return lambda: (plain_first_token(llm, prompts, length), {})

    on_host = {name: arm(name) for name in ARMS} | {f"plain {length}": plain(length) for length in (QUESTION, *LENGTHS)}
    if bench is None:
        return [Setting(lambda: None, on_host)]
    in_pool = {name + POOL: arm(name + POOL) for name in FROM_POOL}
    return [Setting(bench.empty_pool, on_host), Setting(lambda: bench.make_resident(prompts), in_pool)]


def measured_parts(taken: dict[str, Taken], gb_s: tuple[float, float]) -> tuple[MeasuredParts, dict[str, Any]]:
    """What floors are made of, and how it was measured."""
    link, device = gb_s
    lengths = [statistics.median(taken[f"plain {length}"].ms) for length in LENGTHS]
    line = fit_line(LENGTHS, lengths)
    parts = MeasuredParts(
        link_gb_s=link,
        weights_ms=layer_weight_bytes(CONFIG) / device / 1e6,
        row_ms=line.slope,
        full_ms=statistics.median(taken["full"].ms),
        step_ms=statistics.median(taken[f"plain {QUESTION}"].ms),
    )
    how = {
        "device_gb_s": device,
        "full_prefill_ms": dict(zip(map(str, LENGTHS), lengths, strict=True)),
        "line": asdict(line),
        "pass": PASS_FORMULA,
    }
    return parts, {**asdict(parts), **how}


def median_parts(accounts: list[dict[str, Any]]) -> dict[str, float]:
    """Each stage's median milliseconds."""
    stages = dict.fromkeys(stage for account in accounts for stage in account["parts_ms"])
    return {stage: statistics.median(one["parts_ms"].get(stage, 0.0) for one in accounts) for stage in stages}


def of_arm(name: str, taken: Taken, parts: MeasuredParts, chunks: int, system_rows: int) -> dict[str, Any]:
    """What the result says of one arm; `system_rows` are not in the prefix cache."""
    median, options = statistics.median(taken.ms), ARMS[name.removesuffix(POOL)]
    account = taken.accounts[-1]
    values: dict[str, Any] = {
        "median_ms": median,
        "p95_ms": at(taken.ms, 0.95),
        "share_of_full": median / parts.full_ms,
        "options": options,
        "recomputed_ratio": account["recomputed_ratio"],
        "bytes_loaded": account["bytes_loaded"],
        "parts_ms": median_parts(taken.accounts),
    }
    if "selector" in options:
        rows = recomputed_rows(options, chunks, CHUNK)
        loaded = account["bytes_loaded"].get("host", 0)
        work = ArmWork(options["selector"], system_rows, QUESTION, rows, loaded, CONFIG["num_hidden_layers"])
        floor = floor_of(work, parts)
        values.update(
            floor_ms=floor.ms, floor_formula=floor.formula, floor_terms_ms=floor.terms_ms, over_floor=median / floor.ms
        )
    return values


def gaps(llm: Any, prompts: Prompts, options: dict[str, Any] | None, arrivals: int = 12) -> dict[str, float]:
    """Milliseconds between tokens of eight decoding requests while others arrive, one every twelve tokens."""
    engine = llm.llm_engine
    for number in range(8):
        ids = prompts.next({})[0][:512]
        engine.add_request(f"decode-{number}", {"prompt_token_ids": ids}, sampling(None, 12 * arrivals + 24))
    seen: list[float] = []
    steps = arrived = 0
    last: float | None = None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if not any(output.request_id.startswith("decode") for output in outputs):
            continue
        now = time.perf_counter()
        if last is not None and steps > 8:
            seen.append((now - last) * 1e3)
        last, steps = now, steps + 1
        if options is not None and steps % 12 == 0 and arrived < arrivals:
            ids, transfer = prompts.next(options)
            engine.add_request(f"arrival-{arrived}", {"prompt_token_ids": ids}, sampling(transfer, 4))
            arrived += 1
    return {"p50_ms": at(seen, 0.5), "p99_ms": at(seen, 0.99), "max_ms": max(seen)}


def make_stand(args: argparse.Namespace) -> tuple[Any, Any]:
    """An engine, and its parts for the pool, or None without one."""
    settings: dict[str, Any] = {"attention": args.attention}
    if args.rows_per_step:
        settings["max_rows_per_step"] = args.rows_per_step
    compilation: dict[str, Any] = {"custom_ops": [args.custom_ops]}
    if args.cudagraph_mode:
        compilation["cudagraph_mode"] = args.cudagraph_mode
    pool_bytes = 0
    if not args.skip_pool:
        pool_bytes = (args.chunks + 3) * CHUNK * llama_8b.ROW_BYTES
        settings.update(gpu_pool_bytes=pool_bytes, accept_budgets=True)
    llm = llama_8b.make_engine(
        Path("/tmp/llama-8b"),
        settings=settings,
        compilation_config=compilation,
        block_size=args.block_size,
        enable_prefix_caching=args.prefix_caching,
    )
    if args.skip_pool:
        return llm, None
    return llm, Bench(llm, pool_bytes)


def say(result: dict[str, Any]) -> None:
    """One line an arm."""
    for arm, numbers in result["arms"].items():
        parts = {stage: round(ms, 1) for stage, ms in numbers["parts_ms"].items()}
        over = f"{numbers['over_floor']:5.2f} of {numbers['floor_ms']:5.1f}" if "over_floor" in numbers else " " * 14
        print(f"{arm:26s} {numbers['median_ms']:7.1f} ms {numbers['share_of_full']:6.3f} {over} {parts}", flush=True)
    for arm, error in result["failed"].items():
        print(f"{arm:26s} FAILED {error}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=9)
    parser.add_argument("--rows-per-step", type=int)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--custom-ops", default="all", help="vLLM's own kernels in eager layers: all or none")
    parser.add_argument("--cudagraph-mode", help="of vLLM's compilation, such as FULL; vLLM's own by default")
    parser.add_argument("--block-size", type=int, default=64, help="of vLLM's pages")
    parser.add_argument("--prefix-caching", action="store_true", help="the system prompt is in vLLM's prefix cache")
    parser.add_argument("--skip-pool", action="store_true", help="an engine without a GPU pool, and no arms from it")
    parser.add_argument("--skip-gaps", action="store_true")
    parser.add_argument("--commit", default="unknown")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, stand: tuple[Any, Any] | None = None) -> None:
    """Measure; `stand` is what `make_stand` makes, where there is one already."""
    args = parse(argv)
    llm, bench = stand or make_stand(args)
    prompts = Prompts(args.chunks)
    result = described("time to first token, one request at a time", args)
    result["prompt_tokens"] = SYSTEM + args.chunks * CHUNK + QUESTION
    result["chunks"], result["bars"] = args.chunks, BARS
    try:
        result["collect_s"] = collect(llm, prompts)
        gb_s = link_gb_s(), device_gb_s()
        print(f"collected; link {gb_s[0]:.1f} GB/s, device {gb_s[1]:.0f} GB/s", flush=True)
        taken = interleave(settings_of(llm, bench, prompts), args.rounds, lambda n: print(f"round {n}", flush=True))
        result["failed"] = {name: one.error for name, one in taken.items() if one.error is not None}
        result["times_ms"] = {name: one.ms for name, one in taken.items()}
        parts, result["measured_parts"] = measured_parts(taken, gb_s)
        arms = {name: one for name, one in taken.items() if one.error is None and not name.startswith("plain")}
        system_rows = 0 if args.prefix_caching else SYSTEM
        result["arms"] = {name: of_arm(name, one, parts, args.chunks, system_rows) for name, one in arms.items()}
        say(result)
        if not args.skip_gaps:
            if bench is not None:
                bench.empty_pool()
            result["gaps_beside_arrivals"] = {}
            for name in (None, "full", "chunk_head 16", "query 15 %"):
                found = gaps(llm, prompts, None if name is None else ARMS[name])
                result["gaps_beside_arrivals"][name or "none"] = found
                print(f"gaps beside {name or 'none':16s}", {k: round(v, 2) for k, v in found.items()}, flush=True)
    finally:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
