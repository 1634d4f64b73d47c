"""Time between tokens of requests without a plan: vLLM with the connector against vLLM without, in pairs.

    python3 tests/gpu/measure_tpot.py --out FILE.json [--rounds 30] [--commit HASH]

Two engines live side by side on one GPU, each in its own process, and take turns: in each round each decodes the same
eight prompts, in random order. Reported: the mean of the paired differences with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS, PROMPTS, PROMPT_TOKENS = 160, 8, 256


def serve(connector: bool) -> None:
    """A child: for each line on stdin, decode and print the milliseconds a token."""
    from llama_8b import make_engine
    from vllm import SamplingParams

    llm = make_engine(
        Path(f"/tmp/llama-8b-{connector}"),
        connector,
        gpu_memory_utilization=0.35,
        max_model_len=2048,
        # Graphs of the sizes that are used, which halves the start.
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
    )
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    print("ready", flush=True)
    for line in sys.stdin:
        drawn = random.Random(int(line))
        ids = [[drawn.randrange(1000, 100_000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        engine = llm.llm_engine
        for number, prompt in enumerate(ids):
            engine.add_request(f"{line.strip()}-{number}", {"prompt_token_ids": prompt}, params)
        marks = []
        while engine.has_unfinished_requests():
            engine.step()
            marks.append(time.perf_counter())
        # The first steps prefill.
        print((marks[-2] - marks[10]) * 1e3 / (len(marks) - 12), flush=True)


def ask(child: Any, seed: int) -> float:
    child.stdin.write(f"{seed}\n")
    child.stdin.flush()
    return float(answer(child))


def answer(child: Any) -> str:
    """The next line that is ours: vLLM prints as well."""
    for line in child.stdout:
        text = line.strip()
        if text == "ready" or text.replace(".", "", 1).isdigit():
            return text
    raise SystemExit("an engine ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--serve", choices=["with", "without"])
    args = parser.parse_args()
    if args.serve:
        serve(args.serve == "with")
        return
    children = {}
    for name in ("with", "without"):
        command = [sys.executable, __file__, "--serve", name]
        children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        answer(children[name])
    times: dict[str, list[float]] = {name: [] for name in children}
    for number in range(args.rounds + 3):
        order = list(children)
        random.Random(number).shuffle(order)
        for name in order:
            milliseconds = ask(children[name], number)
            if number >= 3:
                times[name].append(milliseconds)
    for child in children.values():
        child.stdin.close()
        child.wait(60)
    relative = [a / b - 1 for a, b in zip(times["with"], times["without"], strict=True)]
    drawn = random.Random(0)
    means = sorted(sum(drawn.choices(relative, k=len(relative))) / len(relative) for _ in range(10_000))
    result = {
        "what": "milliseconds a token of requests without a plan, eight decoding together",
        "commit": args.commit,
        "with_connector_ms": times["with"],
        "without_connector_ms": times["without"],
        "relative_difference": {"mean": sum(relative) / len(relative), "low": means[250], "high": means[9750]},
    }
    print(json.dumps(result["relative_difference"]), sorted(times["without"])[args.rounds // 2])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
