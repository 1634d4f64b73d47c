"""Chunk KV on the move on a GPU: does decoding feel it, how fast is it, and how much of it do blends hide.

    python3 tests/gpu/measure_swapping.py --out FILE.json [--quick] [--rounds 12] [--turns 16] [--commit HASH]

Llama-3-8B shape with dummy weights; chunks of 640 in pinned host memory, several times the GPU pool. In one run:

- swapping: eight requests decode while a predictor that always expects the next chunks of a circle has the scheduler
  evict and promote without end; phases with it, with plain copies of the same chunks that nobody decides, and with
  neither take turns. Gaps between tokens, and the rate of transfers.
- alone: the same transfers without an engine step, and plain copies of the same chunks.
- blends: one request at a time, its chunks in the GPU pool (no copy), on the host with the pool closed (staged copies),
  the same with events around copies and waits, and on the host with the pool open but empty, so that its chunks are
  also promoted when it is admitted. `chunk_head` and `deviation`, without drift, where recomputing takes as long as
  loading.

Scheduler and prefetcher are the engine's own; its internals are read, and told nothing but advice and budgets.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import llama_8b
import torch
import vllm
from blend_prompts import CHUNK, Prompts, collect, first_token, sampling
from swap_bench import Bench, CopyWatch, PlainCopies, Swapper, plain_gb_s

from kvstore.tiers import Tier
from kvstore.transfer_values import TransferOrder

SETTLE = 10
"""Steps at the beginning of a phase that are not counted: copies of the phase before end, or the first ones arrive."""
WARM = 24
HEADS = (16, 32, 64, 96, 128, 160)
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
ON, PLAIN, OFF = "swapping_on", "plain_copies", "swapping_off"
STATES = ("gpu", "host", "host timed", "host promoted")
BARS = {"tpot_ratio": 1.05, "share_of_plain": 0.8, "hidden": 0.8, "connector_over_bound": 1.1}


def swap_alone(bench: Bench, chunks: Sequence[Any], seconds: float, pause_s: float) -> dict[str, Any]:
    """Swap with the prefetcher alone, the pool empty at first."""
    one = bench.store.get(chunks[0]).nbytes
    room, circle = bench.store.budget_bytes(Tier.GPU) // one, cycle(chunks)
    asked: set[Any] = set()
    there: list[Any] = []
    moved = 0
    failed: Counter[str] = Counter()
    began = time.perf_counter()
    while (ours := time.perf_counter() - began < seconds) or asked:
        while ours and len(asked) < room // 2:
            chunk = next(circle)
            if chunk.key not in asked and chunk.key not in there:
                asked.add(chunk.key)
                bench.prefetcher.start([TransferOrder(chunk, Tier.GPU)])
        for result in bench.prefetcher.poll():
            asked.discard(result.key)
            if result.ok:
                moved += result.nbytes
                there.append(result.key)
            else:
                failed[str(result.reason)] += 1
        # Now, for the room is there only when the work that is queued at this moment is over.
        while len(there) > room // 2 - 2:
            bench.store.evict(there.pop(0), Tier.GPU)
        time.sleep(pause_s)
    return {"gb_s": moved / (time.perf_counter() - began) / 1e9, "pause_ms": pause_s * 1e3, "failed": dict(failed)}


def decode(
    bench: Bench, swapper: Swapper, copies: PlainCopies, prompts: Prompts, turns: int, steps: int
) -> dict[str, Any]:
    """Milliseconds between tokens of eight decoding requests in phases of each kind, and what moved."""
    engine = bench.llm.llm_engine
    drawn = random.Random(0)
    pattern = [kind for _ in range(turns) for kind in drawn.sample((ON, PLAIN, OFF), 3)]
    wanted = WARM + len(pattern) * steps
    for number in range(8):
        ids = prompts.next({})[0][:512]
        engine.add_request(f"decode-{time.monotonic_ns()}-{number}", {"prompt_token_ids": ids}, sampling(None, wanted))
    marks: list[float] = []
    copied: list[int] = []
    bench.told.clear()
    while engine.has_unfinished_requests():
        phase = (len(marks) - WARM) // steps
        kind = pattern[phase] if 0 <= phase < len(pattern) else OFF
        swapper.on, copies.on = kind == ON, kind == PLAIN
        if engine.step():
            marks.append(time.perf_counter())
            copied.append(copies.nbytes)
    swapper.on = copies.on = False
    phases = []
    for number, kind in enumerate(pattern):
        first, end = WARM + number * steps + SETTLE, WARM + (number + 1) * steps
        kept = marks[first:end]
        results = [result for at, result in bench.told if kept[0] < at <= kept[-1]]
        phases.append(
            {
                "kind": kind,
                "gaps_ms": [(b - a) * 1e3 for a, b in pairwise(kept)],
                "bytes": sum(result.nbytes for result in results if result.ok),
                "plain_bytes": copied[end - 1] - copied[first],
                "seconds": kept[-1] - kept[0],
                "ended": dict(Counter("ok" if result.ok else str(result.reason) for result in results)),
            }
        )
    return _of_phases(phases)


def _of_phases(phases: list[dict[str, Any]]) -> dict[str, Any]:
    turns = [{phase["kind"]: phase for phase in phases[first : first + 3]} for first in range(0, len(phases), 3)]
    gaps = {kind: sorted(gap for turn in turns for gap in turn[kind]["gaps_ms"]) for kind in (ON, PLAIN, OFF)}
    ended: Counter[str] = Counter()
    for turn in turns:
        ended.update(turn[ON]["ended"])

    def rate(kind: str, of: str) -> float:
        return sum(turn[kind][of] for turn in turns) / sum(turn[kind]["seconds"] for turn in turns) / 1e9

    def ratio(kind: str, of: Callable[[list[float]], float]) -> dict[str, float]:
        return _bootstrap([of(turn[kind]["gaps_ms"]) / of(turn[OFF]["gaps_ms"]) for turn in turns])

    return {
        **{
            kind: {"p50_ms": _at(values, 0.5), "p99_ms": _at(values, 0.99), "mean_ms": _mean(values)}
            for kind, values in gaps.items()
        },
        "tpot_ratio": ratio(ON, _mean),
        "tpot_ratio_of_plain_copies": ratio(PLAIN, _mean),
        "median_gap_ratio": ratio(ON, statistics.median),
        "p99_ratio": _at(gaps[ON], 0.99) / _at(gaps[OFF], 0.99),
        "gb_s": rate(ON, "bytes"),
        "gb_s_of_plain_copies": rate(PLAIN, "plain_bytes"),
        "transfers_ended": dict(ended),
        "phases": phases,
    }


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _at(ascending: Sequence[float], share: float) -> float:
    return ascending[int(share * (len(ascending) - 1))]


def _bootstrap(values: Sequence[float]) -> dict[str, float]:
    drawn = random.Random(0)
    means = sorted(_mean(drawn.choices(values, k=len(values))) for _ in range(10_000))
    return {"mean": _mean(values), "low": means[250], "high": means[9750]}


def tune(bench: Bench, prompts: Prompts, arms: Sequence[dict[str, Any]], load_ms: float) -> dict[str, Any]:
    """Of these options, those whose recomputing takes nearest to `load_ms` with every chunk in the pool."""

    def milliseconds_off(options: dict[str, Any]) -> float:
        found = [recompute_ms(first_token(bench.llm, prompts, options)[1]["parts_ms"], options) for _ in range(4)]
        return abs(statistics.median(found[1:]) - load_ms)

    return min(arms, key=milliseconds_off)


def measure_blends(
    bench: Bench, watch: CopyWatch, prompts: Prompts, arms: dict[str, dict[str, Any]], rounds: int
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By arm and state: each round's time to first token, account, and where timed, copies and waits."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {arm: {state: [] for state in STATES} for arm in arms}
    for number in range(rounds + 2):
        drawn = random.Random(number)
        for state in drawn.sample(STATES, len(STATES)):
            _enter(bench, prompts, state)
            for arm in drawn.sample(sorted(arms), len(arms)):
                if state == "host promoted":
                    _enter(bench, prompts, state)
                watch.on = state == "host timed"
                milliseconds, account = first_token(bench.llm, prompts, arms[arm])
                watch.on = False
                expected = {"gpu"} if state == "gpu" else {"host"}
                assert set(account["bytes_loaded"]) == expected, (state, account)
                run = {"ttft_ms": milliseconds, **{key: account[key] for key in ("parts_ms", "bytes_loaded")}}
                if state == "host timed":
                    run.update(watch.take())
                if number >= 2:
                    runs[arm][state].append(run)
    return runs


def _enter(bench: Bench, prompts: Prompts, state: str) -> None:
    if state == "gpu":
        bench.make_resident(prompts)
        return
    bench.empty_pool()
    if state == "host promoted":
        bench.set_pool(bench.pool_bytes)


def recompute_ms(parts_ms: dict[str, float], options: dict[str, Any]) -> float:
    """Of one blend; `deviation` compares rows while it recomputes, where `query` has asked before."""
    compared = parts_ms.get("score", 0.0) if options["selector"] == "deviation" else 0.0
    return parts_ms["recompute"] + compared


def judge_arm(states: dict[str, list[dict[str, Any]]], arm: dict[str, Any], gb_s: float, layers: int) -> dict[str, Any]:
    """What the runs of an arm of these options come to; see the bars of the issue."""

    def median(state: str, value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(run) for run in states[state])

    def connector(run: dict[str, Any]) -> float:
        return sum(run["parts_ms"].values())

    by_state = {
        state: {
            "ttft_ms": median(state, lambda run: run["ttft_ms"]),
            "connector_ms": median(state, connector),
            "parts_ms": {
                part: median(state, lambda run, part=part: run["parts_ms"].get(part, 0.0))
                for part in states[state][0]["parts_ms"]
            },
        }
        for state in STATES
    }
    load_ms = states["host"][0]["bytes_loaded"]["host"] / gb_s / 1e6
    copy_ms = median("host timed", lambda run: run["copy_ms"])
    alone_ms = recompute_ms(by_state["gpu"]["parts_ms"], arm)
    bound_ms = max(load_ms, alone_ms) + load_ms / layers
    extra_ms = by_state["host"]["connector_ms"] - by_state["gpu"]["connector_ms"]
    return {
        "states": by_state,
        "load_alone_ms": load_ms,
        "recompute_alone_ms": alone_ms,
        "copy_ms": copy_ms,
        "exposed_ms": median("host timed", lambda run: run["exposed_ms"]),
        "hidden": 1 - median("host timed", lambda run: run["exposed_ms"] / run["copy_ms"]),
        "hidden_by_wall": 1 - extra_ms / copy_ms,
        "bound_ms": bound_ms,
        "connector_over_bound": by_state["host"]["connector_ms"] / bound_ms,
        "ttft_host_over_gpu": by_state["host"]["ttft_ms"] / by_state["gpu"]["ttft_ms"],
        "ttft_promoted_over_host": by_state["host promoted"]["ttft_ms"] / by_state["host"]["ttft_ms"],
        "runs": states,
    }


def say(name: str, value: Any, bar: str = "") -> None:
    """One line a number."""
    shown = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
    print(f"{name:64s} {shown}{f'  (bar {BARS[bar]})' if bar else ''}", flush=True)


def measure_swapping(bench: Bench, args: argparse.Namespace, prompts: Prompts, chunks: list[Any]) -> dict[str, Any]:
    """Decoding beside swapping, swapping alone, plain copies; by bytes ahead and bytes a slice."""
    queue = bench.prefetcher._copies
    one = bench.store.get(chunks[0]).nbytes
    swapper = Swapper(bench.scheduler, chunks, args.pool - args.resident)
    copies = PlainCopies([bench.store.get(chunk).kv for chunk in chunks])
    bench.traffic._predictor = swapper
    bench.empty_pool()
    plain = [plain_gb_s(bench, chunks) for _ in range(4)][1:]
    found: dict[str, Any] = {"pool_bytes": args.pool * one, "swapped_bytes": len(chunks) * one, "decoding": {}}
    usual = queue._bytes_ahead, queue._slice_bytes
    for name in ["usual", *args.also]:
        ahead, sliced = usual if name == "usual" else (int(mib) << 20 for mib in name.split(":"))
        queue._bytes_ahead, queue._slice_bytes = ahead, sliced
        bench.set_pool(args.pool * one)
        taken = found["decoding"][name] = decode(bench, swapper, copies, prompts, args.turns, args.steps)
        taken["bytes_ahead"], taken["slice_bytes"] = ahead, sliced
        bench.empty_pool()
        plain.append(plain_gb_s(bench, chunks))
    queue._bytes_ahead, queue._slice_bytes = usual
    copies.close()
    bench.set_pool(args.pool * one)
    found["alone"] = swap_alone(bench, chunks, 1.5, 0.0)
    bench.empty_pool()
    bench.set_pool(args.pool * one)
    found["alone_polled_each_5_ms"] = swap_alone(bench, chunks, 1.5, 0.005)
    bench.empty_pool()
    found["plain_gb_s_all"] = plain
    found["plain_gb_s"] = statistics.median(plain)
    for name, taken in found["decoding"].items():
        for key in (ON, PLAIN, OFF):
            for number, value in taken[key].items():
                say(f"decoding, {name}, {key}, {number}", value)
        say(f"decoding, {name}, TPOT on/off with a 95 % interval", taken["tpot_ratio"], "tpot_ratio")
        say(f"decoding, {name}, TPOT beside plain copies/off", taken["tpot_ratio_of_plain_copies"])
        say(f"decoding, {name}, GB/s of these", taken["gb_s_of_plain_copies"])
        say(f"decoding, {name}, median gap on/off with a 95 % interval", taken["median_gap_ratio"])
        say(f"decoding, {name}, p99 on/off", taken["p99_ratio"])
        say(f"decoding, {name}, transfers ended", taken["transfers_ended"])
        say(f"decoding, {name}, GB/s", taken["gb_s"])
        taken["share_of_plain"] = taken["gb_s"] / found["plain_gb_s"]
        say(f"decoding, {name}, share of plain copies", taken["share_of_plain"], "share_of_plain")
    for name in ("alone", "alone_polled_each_5_ms"):
        found[name]["share_of_plain"] = found[name]["gb_s"] / found["plain_gb_s"]
        say(f"{name}, GB/s", found[name]["gb_s"])
        say(f"{name}, share of plain copies", found[name]["share_of_plain"], "share_of_plain")
    say("plain copies, GB/s", found["plain_gb_s"])
    return found


def measure_overlap(bench: Bench, args: argparse.Namespace, prompts: Prompts, gb_s: float) -> dict[str, Any]:
    """Blends from the host beside blends from the pool."""
    watch = CopyWatch()
    one = bench.store.get(bench.identities(prompts)[0]).nbytes
    bench.make_resident(prompts)
    load_ms = args.chunks * one / gb_s / 1e6
    bare = {"carry_drift": False}
    heads = [{"selector": "chunk_head", "head_tokens": tokens, **bare} for tokens in args.head_tokens]
    ratios = [{"selector": "deviation", "ratio": ratio, **bare} for ratio in args.ratios]
    head, ratio = (tune(bench, prompts, options, load_ms) for options in (heads, ratios))
    arms = {
        "reuse": {"selector": "none"},
        "chunk_head 16, drift": {"selector": "chunk_head", "head_tokens": 16},
        f"chunk_head {head['head_tokens']}": head,
        f"deviation {ratio['ratio']:g}": ratio,
        "query 15 %": {"selector": "query", "ratio": 0.15},
    }
    runs = measure_blends(bench, watch, prompts, arms, args.rounds)
    layers = llama_8b.CONFIG["num_hidden_layers"]
    found = {arm: judge_arm(states, arms[arm], gb_s, int(layers)) for arm, states in runs.items()}
    for arm, numbers in found.items():
        balanced = arms[arm] in (head, ratio)
        for state, values in numbers["states"].items():
            say(f"{arm}, {state}, first token, ms", values["ttft_ms"])
            say(f"{arm}, {state}, connector, ms", values["connector_ms"])
            for part, value in values["parts_ms"].items():
                say(f"{arm}, {state}, {part}, ms", value)
        for name in ("load_alone_ms", "recompute_alone_ms", "copy_ms", "exposed_ms", "bound_ms", "hidden_by_wall"):
            say(f"{arm}, {name}", numbers[name])
        say(f"{arm}, hidden share of the copies", numbers["hidden"], "hidden" if balanced else "")
        say(
            f"{arm}, connector over the larger and one layer's load",
            numbers["connector_over_bound"],
            "connector_over_bound" if balanced else "",
        )
        for name in ("ttft_host_over_gpu", "ttft_promoted_over_host"):
            say(f"{arm}, {name}", numbers[name])
    return {"balanced": [head, ratio], "arms": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds and turns")
    parser.add_argument("--rounds", type=int, default=12, help="of the blends")
    parser.add_argument("--chunks", type=int, default=9, help="of a blend")
    parser.add_argument("--turns", type=int, default=16, help="of phases with swapping, plain copies and neither")
    parser.add_argument("--steps", type=int, default=60, help="of a phase")
    parser.add_argument("--pool", type=int, default=20, help="chunks that the GPU pool holds while it is swapped")
    parser.add_argument("--resident", type=int, default=4, help="chunks of these that are not on their way")
    parser.add_argument("--working-set", type=int, default=80, help="chunks that are swapped")
    parser.add_argument("--head-tokens", type=int, nargs="*", default=HEADS, help="of chunk_head, tried for a balance")
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS, help="of deviation, tried for a balance")
    parser.add_argument("--also", nargs="*", default=[], help="MiB ahead and MiB a slice, such as 128:4, to swap with")
    parser.add_argument("--skip-swapping", action="store_true")
    parser.add_argument("--skip-blends", action="store_true")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    if args.pool < 8 or args.working_set < 2 * args.pool:
        parser.error("swapping needs a pool of 8 chunks or more, and a working set of twice the pool or more")
    if args.quick:
        args.rounds, args.turns = -(-args.rounds // 4), -(-args.turns // 4)
    one = CHUNK * llama_8b.ROW_BYTES
    pool_bytes = max(args.pool, args.chunks + 1) * one
    settings = {
        "gpu_pool_bytes": pool_bytes,
        "host_budget_bytes": (args.working_set + args.chunks + 2) * one,
        "accept_budgets": True,
        "prediction": False,
    }
    bench = Bench(llama_8b.make_engine(Path("/tmp/llama-8b"), settings=settings), pool_bytes)
    blended, swapped = Prompts(args.chunks), Prompts(args.working_set, seed=1)
    collect(bench.llm, blended)
    result: dict[str, Any] = {
        "what": "chunk KV moved while requests decode and while blends compute",
        "model": "Llama-3-8B shape, dummy bf16 weights",
        "device": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": args.commit,
        "arguments": {key: str(value) for key, value in vars(args).items() if key != "out"},
        "chunk_bytes": one,
        "bars": BARS,
    }
    if args.skip_swapping:
        bench.empty_pool()
        gb_s = statistics.median([plain_gb_s(bench, bench.identities(blended)) for _ in range(6)][1:])
        result["plain_gb_s"] = gb_s
    else:
        collect(bench.llm, swapped)
        result["swapping"] = measure_swapping(bench, args, swapped, bench.identities(swapped))
        gb_s = result["swapping"]["plain_gb_s"]
        args.out.write_text(json.dumps(result, indent=1))
    if not args.skip_blends:
        result["blends"] = measure_overlap(bench, args, blended, gb_s)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
