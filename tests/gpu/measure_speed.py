"""Every measurement of speed that can share an engine, over one: starting it takes longer than most of them.

    python3 tests/gpu/measure_speed.py --out FOLDER [--rounds 20] [--skip-pool] [--commit HASH]

Writes what `measure_ttft.py` (9 and 18 chunks), `measure_throughput.py` and `measure_ratios.py` write, each under its
own name, with vLLM's full CUDA graphs and without prefix caching. What fails is said at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_8b
import measure_ratios
import measure_throughput
import measure_ttft
from blend_prompts import CHUNK
from swap_bench import Bench

GRAPHS = "FULL"
MOST_CHUNKS = 18


def make_stand(skip_pool: bool) -> tuple[Any, Any]:
    """An engine for all of them, and its parts for the pool, or None without one."""
    pool_bytes = (MOST_CHUNKS + 3) * CHUNK * llama_8b.ROW_BYTES
    llm = llama_8b.make_engine(
        Path("/tmp/llama-8b"),
        settings={} if skip_pool else {"gpu_pool_bytes": pool_bytes, "accept_budgets": True},
        gpu_memory_utilization=0.6,
        compilation_config={"custom_ops": ["all"], "cudagraph_mode": GRAPHS},
    )
    return llm, None if skip_pool else Bench(llm, pool_bytes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20, help="of the times to first token; half of it for the ratios")
    parser.add_argument("--skip-pool", action="store_true", help="an engine without a GPU pool, and no arms from it")
    parser.add_argument("--commit", default="unknown")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    llm, bench = make_stand(args.skip_pool)
    failed: list[str] = []

    def measure(run: Callable[[list[str]], None], name: str, *options: str) -> None:
        print(f"== {name}", flush=True)
        try:
            run([*options, "--out", str(args.out / name), "--commit", args.commit])
        except Exception as error:
            # The others are worth having without it.
            failed.append(f"{name}: {error!r}")

    def ttft(argv: list[str]) -> None:
        pool = ["--skip-pool"] if args.skip_pool else []
        measure_ttft.main([*argv, *pool, "--rounds", str(args.rounds), "--cudagraph-mode", GRAPHS], (llm, bench))

    measure(ttft, "ttft.json")
    measure(ttft, "ttft-18-chunks.json", "--skip-gaps", "--chunks", str(MOST_CHUNKS))
    if bench is not None:
        bench.empty_pool()
    measure(lambda argv: measure_throughput.main(argv, llm), "throughput.json")
    rounds = ["--rounds", str(max(args.rounds // 2, 1))]
    measure(lambda argv: measure_ratios.main([*argv, *rounds], llm), "ratios.json")
    if failed:
        raise SystemExit("\n".join(["FAILED", *failed]))


if __name__ == "__main__":
    main()
