"""Time to first token of full prefill over that of blended arms, measured side by side.

    python -m eval.latency --chunks 10 --chunk-tokens 500 --repetitions 5

Chunks are warm in host memory; selection, relocation, scheduling and transfer are inside the times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM

from cacheblend.models.loading import torch_dtype
from cacheblend.plan import require_fits
from cacheblend.reference.runner import ReferenceRunner
from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from eval.fidelity.arms import Arm, parse_arms
from eval.layout import LaidOutPrompt
from eval.provenance import ModelIdentity, provenance
from eval.speed.measure import SpeedRun, Stand, measure
from eval.speed.report import print_speed, speed_values
from eval.speed.workload import make_workload
from inputs import INVENTED_PATH
from kvstore.store import ChunkStore
from pipelines.models import DEFAULT_MODEL, resolve_model
from pipelines.tokenizer import require_tokenizer

DEFAULT_ARMS = "full,reuse,chunk_head:16,deviation:0.15,query:0.15,query:0.15:drift"
HOST_BUDGET_BYTES = 16 << 30

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def latency(
    model: Annotated[str, typer.Option(help="bundled:NAME, a folder or a hub id")] = DEFAULT_MODEL,
    arms: Annotated[str, typer.Option(help="arms, separated by commas")] = DEFAULT_ARMS,
    chunks: Annotated[int, typer.Option(help="chunks in the prompt")] = 10,
    chunk_tokens: Annotated[int, typer.Option(help="tokens of a chunk")] = 500,
    repetitions: Annotated[int, typer.Option(min=1, help="timed servings of each arm")] = 5,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = 2,
    seed: Annotated[int, typer.Option(help="of the arms' order")] = 0,
    out: Annotated[Path | None, typer.Option(help="file for the result as JSON")] = None,
) -> None:
    """Run the benchmark and print ratios."""
    arguments = dict(locals())
    torch.set_num_threads(threads)
    with one_sentence_for_bad_input():
        chosen = parse_arms(arms)
        folder = resolve_model(model)
        workload = make_workload(require_tokenizer(folder), chunks, chunk_tokens)
        run = _run(folder, dtype, workload, chosen, repetitions, seed)
        print_speed(run)
        if out is not None:
            account = provenance(arguments, ModelIdentity(model, run.fingerprint), "cpu", seed, INVENTED_PATH)
            _write(out, json.dumps({"provenance": account, **speed_values(run)}, indent=2) + "\n")


def _run(
    folder: Path, dtype: str, workload: LaidOutPrompt, arms: Sequence[Arm], repetitions: int, seed: int
) -> SpeedRun:
    with closing(ChunkStore(None, HOST_BUDGET_BYTES)) as store:
        runner = ReferenceRunner.from_folder(folder, store, dtype)
        require_fits(workload.length, 1, runner.max_model_len)
        stock = _stock_prefill(folder, dtype, workload)
        with closing(Stand(runner, store, workload)) as stand, Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("serving", total=(repetitions + 1) * (len(arms) + 1))
            times, stock_ms, share = measure(stand.serve, stock, arms, repetitions, seed, lambda: bar.advance(task))
    return SpeedRun(
        arms=times,
        stock_ms=stock_ms,
        share=share,
        prompt_tokens=workload.length,
        chunks=len(workload.chunks),
        kv_bytes_per_token=runner.kv_bytes_per_token,
        build_seconds=stand.build_seconds,
        fingerprint=runner.fingerprint,
    )


def _stock_prefill(folder: Path, dtype: str, workload: LaidOutPrompt) -> Callable[[], float]:
    """Full prefill of the same prompt by transformers alone, with its fastest CPU attention: milliseconds."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(dtype), attn_implementation="sdpa")
    model.eval()
    ids = torch.tensor([workload.token_ids])

    def prefill() -> float:
        started = perf_counter()
        with torch.inference_mode():
            int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return (perf_counter() - started) * 1e3

    return prefill


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as error:
        raise EvalError(f"--out {out} cannot be written ({error.strerror}); name a writable file.") from error


if __name__ == "__main__":
    app()
