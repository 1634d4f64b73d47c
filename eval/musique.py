"""Answers the questions of a MuSiQue- or CacheBlend-shaped file with any arms, and reports how faithful they are.

python -m eval.musique --questions 5 --arms full,full-again,reuse,query:0.15

Over contexts that were retrieved (see eval.retrieval) instead of each question's own, with --retrieved FILE. With
chunks encoded behind other chunks of the same data, the same for every question, with --primer-tokens 1024.

On vLLM in shards, each of which the same command with the next number goes on from:

python -m eval.musique --engine vllm --dtype bfloat16 --minutes 8 --shard 1/2
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from eval.fidelity.arms import parse_arms, parse_tiers, report_rows, require_runnable
from eval.fidelity.bench import FidelityBench
from eval.fidelity.comparisons import require_among
from eval.fidelity.evaluation import evaluate
from eval.fidelity.priming import Priming
from eval.fidelity.reference_bench import ReferenceBench
from eval.fidelity.shards import Clock, parse_shard
from eval.fidelity.vllm_bench import VllmBench
from eval.retrieved import give_retrieved
from inputs import INVENTED_PATH, distinct_contexts, load_examples
from pipelines.cli.failures import INTERRUPTED
from pipelines.config import PipelineConfig, PrefixMode, make_config
from pipelines.models import DEFAULT_MODEL
from pipelines.runners import VLLM

DEFAULT_ARMS = "full,full-again,reuse,chunk_head:16,deviation:0.15,query:0.15,query:0.15:drift"
RESULTS = Path("results")
"""Folder, in the current one, of results that are not sent elsewhere."""

app = typer.Typer(add_completion=False)


@app.command()
def musique(
    data: Annotated[
        Path,
        typer.Option(help="MuSiQue's JSON lines or CacheBlend's JSON array.", show_default="our invented questions"),
    ] = INVENTED_PATH,
    retrieved: Annotated[
        Path | None,
        typer.Option(
            help="Take each question's contexts from this file of eval.retrieval --ids.",
            show_default="its own contexts",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; a second call with the same settings goes on.",
            show_default="results/ and the data file's name",
        ),
    ] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Take so many from the top; all by default.")] = None,
    arms: Annotated[
        str,
        typer.Option(
            help="full, full-again, prefix-cached, reuse, or SELECTOR:PARAMETER as chunk_head:16 or query:0.15."
        ),
    ] = DEFAULT_ARMS,
    tiers: Annotated[str, typer.Option(help="Where chunks are when asked for: warm, cold or warm,cold.")] = "warm",
    model: Annotated[str, typer.Option(help="A model folder, a hub id or bundled:NAME.")] = DEFAULT_MODEL,
    engine: Annotated[
        str, typer.Option(envvar="ENGINE", help="reference, vllm, or auto, which is reference.")
    ] = "auto",
    engine_options: Annotated[
        str | None, typer.Option(help="Arguments of vLLM's engine, as a JSON object.", show_default="none")
    ] = None,
    in_flight: Annotated[
        int, typer.Option(min=1, help="Answers that vLLM generates together; 1 for times to first token.")
    ] = 8,
    shard: Annotated[str, typer.Option(help="I/N: every N-th question from the I-th on, into the same --out.")] = "1/1",
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="End after the question that is asked when they are up; the same command goes on."),
    ] = None,
    apart: Annotated[
        int | None, typer.Option(min=2, help="Report the questions from this one on apart as well, in a subfolder.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device, of the engine reference.")] = "cpu",
    prefix: Annotated[PrefixMode, typer.Option(help="What chunks are encoded behind.")] = PrefixMode.SYSTEM,
    primer_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Encode chunks behind so many tokens of the data's contexts too, at most; 0: none.",
        ),
    ] = 0,
    chunk_tokens: Annotated[int, typer.Option(help="Cut contexts longer than this, as pipelines do.")] = 1024,
    against: Annotated[
        str | None, typer.Option(help="An arm to compare the others with, paired by question, as deviation:0.15.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the order of arms and of the resampling.")] = 0,
    cache_dir: Annotated[Path | None, typer.Option(help="Keep chunk KV here; in memory by default.")] = None,
    host_gib: Annotated[float, typer.Option(min=0, help="GiB of chunk KV that host memory may hold.")] = 4.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away the results that --out holds.")] = False,
) -> None:
    """Answer questions over their own or retrieved contexts with several arms; report fidelity, scores and times.

    Example: python -m eval.musique --questions 3
    """
    clock = Clock(minutes)
    out = out or RESULTS / data.stem
    arguments = {**locals(), "prefix": prefix.value}
    del arguments["clock"]
    with one_sentence_for_bad_input(), _resumable(out):
        config = make_config(
            model=model,
            engine=engine,
            engine_options=_engine_options(engine_options),
            dtype=dtype,
            device=device,
            prefix=prefix,
            chunk_tokens=chunk_tokens,
            max_tokens=max_tokens,
            cache_dir=cache_dir,
            host_budget_bytes=int(host_gib * (1 << 30)),
            index_dir=None,
        )
        rows = report_rows(parse_arms(arms), parse_tiers(tiers))
        require_runnable(rows, engine == VLLM)
        require_among(against, rows)
        part = parse_shard(shard)
        everything = load_examples(data)
        examples = everything if retrieved is None else give_retrieved(retrieved, data, everything)
        priming = Priming(distinct_contexts(everything), primer_tokens) if primer_tokens else None
        with _bench(config, in_flight, priming) as bench:
            typer.echo(evaluate(bench, examples[:questions], rows, arguments, part, clock), nl=False)


def _engine_options(text: str | None) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise EvalError(f'--engine-options is no JSON ({error}); give an object as {{"max_num_seqs": 64}}.') from None
    if not isinstance(options, dict):
        raise EvalError(f'--engine-options is {options!r}; give an object as {{"max_num_seqs": 64}}.')
    return options


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; what was finished is in {out}, and the same command goes on from there", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _bench(config: PipelineConfig, in_flight: int, priming: Priming | None) -> Iterator[FidelityBench]:
    bench = VllmBench(config, in_flight, priming) if config.engine == VLLM else ReferenceBench(config, priming)
    try:
        yield bench
    finally:
        bench.close()


if __name__ == "__main__":
    app()
