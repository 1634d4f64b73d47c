"""Time to first token against the rows recomputed on a GPU: is it linear in them, and where does it cross full's.

    python3 tests/gpu/measure_ratios.py --out FILE.json [--rounds 10] [--selectors query deviation] [--commit HASH]

64 system tokens, chunks of 640 and 64 of a question, chunk KV in pinned host memory, one request at a time; full
prefill, every selector at every ratio, and chunk heads, interleaved in one run; drift is carried, as by default. By
selector the result states the line of least squares through the medians, the largest distance of a median from it, the
largest share of full prefill's time, and the ratio at which that line reaches full prefill's, so that blending stops
paying. A ratio of 1 is no point of the line: where everything is recomputed, nothing is loaded, scored or scattered.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blend_prompts import CHUNK, QUESTION, SYSTEM, Prompts, collect, first_token
from hardware import described
from llama_8b import make_engine

from eval.speed.floor import recomputed_rows
from eval.speed.interleaved import Run, Setting, Taken, interleave
from eval.speed.lines import fit_line

SELECTORS = ("query", "deviation", "chunk_head+query")
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
HEADS = (4, 16, 32, 96)
DRIFT = {"carry_drift": True}
BAR_SHARE_OF_FULL = 1.1


def arms_of(selectors: Sequence[str], ratios: Sequence[float], heads: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Options of the requests by arm."""
    by_ratio = {
        f"{s} {ratio:g}": {"selector": s, "ratio": ratio, **DRIFT} for s in selectors for ratio in sorted(ratios)
    }
    by_head = {
        f"chunk_head {count}": {"selector": "chunk_head", "head_tokens": count, **DRIFT} for count in sorted(heads)
    }
    return {"full": {"policy": "full"}, **by_ratio, **by_head}


def run_of(llm: Any, prompts: Prompts, options: dict[str, Any]) -> Run:
    """One request of an arm, served as it says."""

    def once() -> tuple[float, dict[str, Any]]:
        milliseconds, account = first_token(llm, prompts, options)
        if (account["mode"] == "full") != ("selector" not in options):
            raise RuntimeError(f"{options} was served otherwise: {account}")
        return milliseconds, account

    return once


def row_of(options: dict[str, Any], taken: Taken, full: float, chunks: int) -> dict[str, Any]:
    """What the result says of one arm."""
    median = statistics.median(taken.ms)
    return {
        "options": options,
        "rows": recomputed_rows(options, chunks, CHUNK),
        "median_ms": median,
        "share_of_full": median / full,
        "recomputed_ratio": taken.accounts[-1]["recomputed_ratio"],
    }


def line_of(rows: Sequence[dict[str, Any]], full: float, reusable: int) -> dict[str, Any]:
    """What the ratios of one selector come to, of prompts with so many reusable rows."""
    some = [row for row in rows if row["options"]["ratio"] < 1]
    line = fit_line([row["rows"] for row in some], [row["median_ms"] for row in some])
    return {
        "ms_by_rows": asdict(line),
        "largest_share_of_full": max(row["median_ms"] for row in rows) / full,
        "crossover_ratio": line.reaches(full) / reusable,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--chunks", type=int, default=9)
    parser.add_argument("--selectors", nargs="+", default=SELECTORS, help="such as take a ratio")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--heads", type=int, nargs="*", default=HEADS, help="tokens of chunk_head")
    parser.add_argument("--commit", default="unknown")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, llm: Any = None) -> None:
    """Measure, with an engine of its own unless there is one already."""
    args = parse(argv)
    result = described("time to first token against the rows recomputed, one request at a time", args)
    result["prompt_tokens"] = SYSTEM + args.chunks * CHUNK + QUESTION
    result["bars"] = {"largest_share_of_full": BAR_SHARE_OF_FULL}
    arms = arms_of(args.selectors, args.ratios, args.heads)
    try:
        llm = llm or make_engine(Path("/tmp/llama-8b"), compilation_config={"custom_ops": ["all"]})
        prompts = Prompts(args.chunks)
        result["collect_s"] = collect(llm, prompts)
        runs = {name: run_of(llm, prompts, options) for name, options in arms.items()}
        taken = interleave(
            [Setting(lambda: None, runs)], args.rounds, lambda n: print(f"round {n} of {args.rounds}", flush=True)
        )
        result["failed"] = {name: one.error for name, one in taken.items() if one.error is not None}
        result["times_ms"] = {name: one.ms for name, one in taken.items()}
        full = result["full_ms"] = statistics.median(taken["full"].ms)
        whole = [name for name in arms if name != "full" and name not in result["failed"]]
        result["ratios"] = [row_of(arms[name], taken[name], full, args.chunks) for name in whole]
        result["lines"] = {}
        for selector in args.selectors:
            rows = [row for row in result["ratios"] if row["options"]["selector"] == selector]
            if len(rows) > 2:
                result["lines"][selector] = line_of(rows, full, args.chunks * CHUNK)
    finally:
        args.out.write_text(json.dumps(result, indent=1))
    for name, row in zip(whole, result["ratios"], strict=True):
        print(f"{name:24s} {row['median_ms']:8.1f} ms {row['share_of_full']:6.3f} of full", flush=True)
    for selector, line in result["lines"].items():
        print(f"{selector:24s} {line}", flush=True)
    for name, error in result["failed"].items():
        print(f"{name:24s} FAILED {error}", flush=True)


if __name__ == "__main__":
    main()
