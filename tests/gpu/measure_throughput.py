"""Requests a second on a GPU with many in flight: full prefill against blended arms, in alternating blocks of one run.

    python3 tests/gpu/measure_throughput.py --out FILE.json [--quick] [--in-flight 32] [--blocks 3] [--commit HASH]

64 system tokens, 9 chunks of 640 drawn anew for every request from a corpus in pinned host memory, and 64 of a
question; 32 tokens out. A closed loop: a finished request is replaced at once, until a block's seconds are over; then
the block ends when its last request has. The rate is finished requests by the whole time, so each block's last tokens,
which decode beside no prefill, count against every arm. Blocks of the arms take turns in random order.

`default` is the selector and the ratio that the connector takes when a request names none. Times to first token
include waiting: with many in flight, mostly for one another.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from blend_prompts import ARMS as TTFT_ARMS
from blend_prompts import CHUNK, QUESTION, SYSTEM, Prompts, collect, sampling
from hardware import described
from llama_8b import make_engine

from eval.speed.closed_loop import Block, Served, loop_values

ARMS: dict[str, dict[str, Any]] = {**TTFT_ARMS, "default": {}}
BARS = {
    "requests_over_full": {
        "default": {"required": 3.0, "aim": 3.8},
        "query 15 %": {"required": 3.0, "aim": 3.8},
        "chunk_head 16": {"aim": 6.0},
    }
}


class Loop:
    """Keeps so many requests of an arm in flight.

    Args:
        llm: the engine.
        prompts: what is asked.
        in_flight: requests at any time.
        tokens: each request's answer.
    """

    def __init__(self, llm: Any, prompts: Prompts, in_flight: int, tokens: int) -> None:
        self._engine = llm.llm_engine
        self._prompts = prompts
        self._in_flight = in_flight
        self._tokens = tokens
        self._submitted = 0
        self._open: dict[str, Served] = {}

    def run(self, arm: str, seconds: float) -> tuple[Block, dict[str, Any]]:
        """One block of at least so many seconds, and the account of its last request.

        Raises:
            RuntimeError: a request was not served as its arm says; what is in flight has been aborted.
        """
        torch.cuda.synchronize()
        block, account = Block(), {}
        end = time.perf_counter() + seconds
        try:
            for _ in range(self._in_flight):
                self._submit(arm)
            while self._open:
                for output in self._engine.step():
                    self._note(output)
                    if not output.finished:
                        continue
                    account = _account(output, arm)
                    block.served.append(self._open.pop(output.request_id))
                    if time.perf_counter() < end:
                        self._submit(arm)
        finally:
            if self._open:
                self._engine.abort_request(list(self._open))
                self._open.clear()
        return block, account

    def _submit(self, arm: str) -> None:
        ids, transfer = self._prompts.next(ARMS[arm])
        name = f"{arm} {self._submitted}"
        self._submitted += 1
        self._open[name] = Served(time.perf_counter())
        self._engine.add_request(name, {"prompt_token_ids": ids}, sampling(transfer, self._tokens))

    def _note(self, output: Any) -> None:
        served, now = self._open[output.request_id], time.perf_counter()
        served.first = served.first or now
        served.last = now
        served.tokens = len(output.outputs[0].token_ids)


def _account(output: Any, arm: str) -> dict[str, Any]:
    account: dict[str, Any] = output.kv_transfer_params["cacheblend"]
    if account["mode"] != ("full" if arm == "full" else "blend"):
        raise RuntimeError(f"{arm} was served otherwise: {account}")
    return {name: account[name] for name in ("mode", "selector", "recomputed_ratio", "bytes_loaded")}


def measure(loop: Loop, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """All blocks in turns, each arm's numbers into the result as soon as they are there."""
    blocks: dict[str, list[Block]] = {arm: [] for arm in args.arms}
    accounts: dict[str, dict[str, Any]] = {}
    for arm in args.arms:
        take_block(loop, arm, 0.0, blocks, accounts, result)
    # Those were the warm-up.
    for taken in blocks.values():
        taken.clear()
    for number in range(args.blocks):
        for arm in random.Random(number).sample(args.arms, len(args.arms)):
            take_block(loop, arm, args.seconds, blocks, accounts, result)
        result["arms"] = {arm: {**loop_values(taken), **accounts[arm]} for arm, taken in blocks.items() if taken}
    full = result["arms"].get("full")
    for numbers in result["arms"].values() if full else ():
        numbers["requests_over_full"] = numbers["requests_per_s"] / full["requests_per_s"]


def take_block(
    loop: Loop,
    arm: str,
    seconds: float,
    blocks: dict[str, list[Block]],
    accounts: dict[str, dict[str, Any]],
    result: dict[str, Any],
) -> None:
    """One block of one arm; an arm that fails ends, the others go on."""
    if arm in result["failed"]:
        return
    try:
        block, accounts[arm] = loop.run(arm, seconds)
    except Exception as error:
        result["failed"][arm] = repr(error)
        print(f"{arm:22s} FAILED {error!r}", flush=True)
        return
    blocks[arm].append(block)
    print(f"{arm:22s} {block.requests_per_s:7.2f} requests/s in {block.seconds:5.1f} s", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="one block of two seconds an arm")
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--blocks", type=int, default=3, help="of each arm")
    parser.add_argument("--seconds", type=float, default=5.0, help="in which a block's finished requests are replaced")
    parser.add_argument("--chunks", type=int, default=9, help="of a prompt")
    parser.add_argument("--corpus", type=int, default=64, help="chunks that prompts are drawn from")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["full", "chunk_head 16", "default"])
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args(argv)
    if args.quick:
        args.blocks, args.seconds = 1, 2.0
    if args.corpus < args.chunks:
        parser.error(f"a prompt of {args.chunks} chunks cannot be drawn from a corpus of {args.corpus}")
    return args


def main(argv: Sequence[str] | None = None, llm: Any = None) -> None:
    """Measure, with an engine of its own unless there is one already."""
    args = parse(argv)
    result = described("requests a second in a closed loop", args)
    result.update(prompt_tokens=SYSTEM + args.chunks * CHUNK + QUESTION, bars=BARS, failed={}, arms={})
    try:
        llm = llm or make_engine(
            Path("/tmp/llama-8b"),
            gpu_memory_utilization=args.gpu_memory_utilization,
            compilation_config={"custom_ops": ["all"]},
        )
        prompts = Prompts(args.corpus, a_prompt=args.chunks)
        result["collect_s"] = collect(llm, prompts)
        print(f"collected {args.corpus} chunks in {result['collect_s']:.1f} s", flush=True)
        measure(Loop(llm, prompts, args.in_flight, args.tokens), args, result)
    finally:
        args.out.write_text(json.dumps(result, indent=1))
    for arm, numbers in result["arms"].items():
        shown = {name: round(value, 3) for name, value in numbers.items() if isinstance(value, float)}
        print(f"{arm:22s} {shown}", flush=True)


if __name__ == "__main__":
    main()
