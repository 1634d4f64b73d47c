"""Time to first token on a GPU: full prefill against blended arms, interleaved in one run; and decoding beside them.

    python3 tests/gpu/measure_ttft.py --out FILE.json [--rounds 20] [--chunks 9] [--commit HASH]

64 system tokens, chunks of 640 and 64 of a question; KV of the chunks in pinned host memory; one request at a time,
from its submission to its first token. Then eight requests decode while others arrive, and the time between their
tokens is reported with arrivals prefilled whole, blended, and without arrivals.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import vllm
from llama_8b import make_engine
from vllm import SamplingParams

SYSTEM, CHUNK, QUESTION = 64, 640, 64
ARMS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "reuse": {"selector": "none"},
    "chunk_head 16": {"selector": "chunk_head", "head_tokens": 16},
    "deviation 15 %": {"selector": "deviation", "ratio": 0.15},
    "query 15 %": {"selector": "query", "ratio": 0.15},
    "chunk_head+query 15 %": {"selector": "chunk_head+query", "ratio": 0.15},
}


class Prompts:
    """Prompts over the same chunks in ever new orders, with ever new questions."""

    def __init__(self, chunks: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.system = self._ids(SYSTEM)
        self.chunks = [self._ids(CHUNK) for _ in range(chunks)]

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(1000, 100_000) for _ in range(count)]

    def next(self, options: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """(ids, kv_transfer_params)."""
        order = self._random.sample(self.chunks, len(self.chunks))
        ids = [*self.system, *(token for chunk in order for token in chunk), *self._ids(QUESTION)]
        segments = [
            {"tokens": SYSTEM, "reuse": False},
            *({"tokens": CHUNK, "reuse": True} for _ in order),
            {"tokens": QUESTION, "reuse": False},
        ]
        return ids, {"cacheblend": {"version": 1, "segments": segments, **options}}


def sampling(transfer: dict[str, Any] | None, tokens: int) -> SamplingParams:
    extra = {"kv_transfer_params": transfer} if transfer else None
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)


def collect(llm: Any, prompts: Prompts) -> float:
    """Have the engine collect the chunks; seconds it took."""
    started = time.perf_counter()
    params = sampling({"cacheblend": {"version": 1, "collect": SYSTEM}}, 2)
    asked = [{"prompt_token_ids": [*prompts.system, *chunk]} for chunk in prompts.chunks]
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert all(output.kv_transfer_params["cacheblend"]["on_host"] for output in outputs)
    return time.perf_counter() - started


def first_token(llm: Any, prompts: Prompts, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Milliseconds to one token of one request, and its account."""
    ids, transfer = prompts.next(options)
    torch.cuda.synchronize()
    started = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": ids}], sampling(transfer, 1), use_tqdm=False)
    return (time.perf_counter() - started) * 1e3, output.kv_transfer_params["cacheblend"]


def measure_arms(llm: Any, prompts: Prompts, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    accounts: dict[str, dict[str, Any]] = {}
    order = list(ARMS)
    for number in range(rounds + 3):
        random.Random(number).shuffle(order)
        for arm in order:
            milliseconds, account = first_token(llm, prompts, ARMS[arm])
            assert (account["mode"] == "full") == (arm == "full"), account
            if number >= 3:
                times[arm].append(milliseconds)
                accounts[arm] = account
    full = statistics.median(times["full"])
    return {
        arm: {
            "median_ms": statistics.median(values),
            "p95_ms": sorted(values)[int(0.95 * (len(values) - 1))],
            "share_of_full": statistics.median(values) / full,
            "recomputed_ratio": accounts[arm]["recomputed_ratio"],
            "parts_ms": accounts[arm]["parts_ms"],
            "all_ms": values,
        }
        for arm, values in times.items()
    }


def gaps(llm: Any, prompts: Prompts, options: dict[str, Any] | None, arrivals: int = 12) -> dict[str, float]:
    """Milliseconds between tokens of eight decoding requests while others arrive, one every twelve tokens."""
    engine, decoding = llm.llm_engine, {}
    for number in range(8):
        ids = prompts.next({})[0][:512]
        engine.add_request(f"decode-{number}", {"prompt_token_ids": ids}, sampling(None, 12 * arrivals + 24))
        decoding[f"decode-{number}"] = []
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
    seen.sort()
    return {"p50_ms": seen[len(seen) // 2], "p99_ms": seen[int(0.99 * (len(seen) - 1))], "max_ms": seen[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=9)
    parser.add_argument("--rows-per-step", type=int)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--custom-ops", default="all", help="vLLM's own kernels in eager layers: all or none")
    parser.add_argument("--skip-gaps", action="store_true")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    settings: dict[str, Any] = {"attention": args.attention}
    if args.rows_per_step:
        settings["max_rows_per_step"] = args.rows_per_step
    compilation = {"custom_ops": [args.custom_ops]}
    llm = make_engine(Path("/tmp/llama-8b"), settings=settings, compilation_config=compilation)
    prompts = Prompts(args.chunks)
    collected = collect(llm, prompts)
    result: dict[str, Any] = {
        "what": "time to first token, one request at a time",
        "prompt_tokens": SYSTEM + args.chunks * CHUNK + QUESTION,
        "model": "Llama-3-8B shape, dummy bf16 weights",
        "device": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": args.commit,
        "arguments": {key: str(value) for key, value in vars(args).items() if key != "out"},
        "collect_s": collected,
        "arms": measure_arms(llm, prompts, args.rounds),
    }
    for arm, numbers in result["arms"].items():
        parts = {stage: round(ms, 1) for stage, ms in numbers["parts_ms"].items()}
        print(f"{arm:24s} {numbers['median_ms']:8.1f} ms {numbers['share_of_full']:6.3f} {parts}", flush=True)
    if not args.skip_gaps:
        arrivals = {
            "none": None,
            "full": ARMS["full"],
            "chunk_head 16": ARMS["chunk_head 16"],
            "query 15 %": ARMS["query 15 %"],
        }
        result["gaps_beside_arrivals"] = {name: gaps(llm, prompts, options) for name, options in arrivals.items()}
        for name, numbers in result["gaps_beside_arrivals"].items():
            print(f"gaps beside {name:16s}", {key: round(value, 2) for key, value in numbers.items()}, flush=True)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
