"""Time to first token of full prefill over that of blended arms, measured side by side.

    python -m eval.latency --chunks 10 --chunk-tokens 500 --repetitions 5

Chunks are warm in host memory; selection, relocation, scheduling and transfer are inside the times.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend.models.loading import torch_dtype
from cacheblend.reference.runner import ReferenceRunner
from eval.errors import EvalError
from eval.fidelity.arms import parse_arms
from eval.provenance import ModelIdentity, provenance
from eval.speed.measure import ArmTimes, CpuShare, Stand, measure
from eval.speed.workload import Workload, make_workload
from inputs import INVENTED_PATH
from kvstore.store import ChunkStore
from pipelines.cli.output import PIPED_WIDTH
from pipelines.errors import ModelError
from pipelines.models import DEFAULT_MODEL, resolve_model

DEFAULT_ARMS = "full,reuse,chunk_head:16,deviation:0.15,query:0.15,chunk_head+query:0.15"
PARTS = ("load", "relocate", "score", "recompute", "question")

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
    try:
        chosen = parse_arms(arms)
        folder = resolve_model(model)
        workload = make_workload(AutoTokenizer.from_pretrained(folder), chunks, chunk_tokens)
    except (EvalError, ModelError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None
    store = ChunkStore(None, 16 << 30)
    runner = ReferenceRunner.from_folder(folder, store, dtype)
    stock = _stock_prefill(folder, dtype, workload)
    stand = Stand(runner, store, workload)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("serving", total=(repetitions + 1) * (len(chosen) + 1))
        times, stock_ms, share = measure(stand, chosen, repetitions, seed, lambda: progress.advance(task), stock)
    stand.close()
    _print(times, stock_ms, share, workload, runner, stand)
    if out is not None:
        identity = ModelIdentity(model, runner.fingerprint)
        result = {
            "provenance": provenance(arguments, identity, "cpu", seed, INVENTED_PATH),
            "prompt_tokens": workload.length,
            "kv_bytes_per_token": runner.kv_bytes_per_token,
            "kv_build_seconds": stand.build_seconds,
            "cpu_time_over_wall_time": share.over_wall,
            "void": share.void,
            "full_over_stock_transformers": median(stock_ms) / times[0].median_ms,
            "arms": [_row(arm, times[0]) for arm in times],
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")


def _stock_prefill(folder: Path, dtype: str, workload: Workload) -> Any:
    """Full prefill of the same prompt by transformers alone, with its fastest CPU attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(dtype), attn_implementation="sdpa").eval()
    ids = torch.tensor([[*workload.head, *(i for chunk in workload.chunks for i in chunk), *workload.question]])

    @torch.inference_mode()
    def prefill() -> float:
        started = perf_counter()
        int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return (perf_counter() - started) * 1e3

    return prefill


def _row(arm: ArmTimes, full: ArmTimes) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "full_over_arm": full.median_ms / arm.median_ms,
        "parts_share_of_full": {part: median(ms) / full.median_ms for part, ms in arm.parts_ms.items()},
        "recomputed_tokens": arm.recomputed_tokens,
        "recomputed_ratio": arm.recomputed_ratio,
        "first_token_is_fulls": arm.first_token == full.first_token,
        "ttft_share_of_full": [ms / full.median_ms for ms in arm.ttft_ms],
    }


def _print(
    times: list[ArmTimes],
    stock_ms: list[float],
    share: CpuShare,
    workload: Workload,
    runner: ReferenceRunner,
    stand: Stand,
) -> None:
    console = Console()
    console = Console(width=console.width if console.is_terminal else PIPED_WIDTH)
    full = times[0]
    table = Table(title=f"{workload.length} prompt tokens, {len(workload.chunks)} chunks warm in host memory")
    table.add_column("arm")
    table.add_column("TTFT full / arm", justify="right")
    table.add_column("recomputed", justify="right")
    for part in PARTS:
        table.add_column(part, justify="right")
    for arm in times:
        parts = [f"{median(arm.parts_ms[p]) / full.median_ms:.1%}" if p in arm.parts_ms else "" for p in PARTS]
        table.add_row(arm.name, f"{full.median_ms / arm.median_ms:.2f}", str(arm.recomputed_tokens), *parts)
    console.print(table)
    console.print("Parts are shares of full prefill's time to first token; medians.")
    console.print(f"Full prefill by transformers alone takes {median(stock_ms) / full.median_ms:.2f} of ours.")
    console.print(
        f"KV: {runner.kv_bytes_per_token} bytes a token, built once in "
        f"{stand.build_seconds * 1e3 / full.median_ms:.2f} of a full prefill's time."
    )
    console.print(f"CPU time over wall time: {share.over_wall:.2f} with {torch.get_num_threads()} threads.")
    if share.void:
        console.print("VOID: the processors were not free while this ran; repeat it on an idle machine.")


if __name__ == "__main__":
    app()
