"""Answers the questions of a MuSiQue- or CacheBlend-shaped file with any arms, and reports how faithful they are.

python -m eval.musique --questions 5 --arms full,full-again,reuse,query:0.15
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from eval.fidelity.arms import Row, parse_arms, parse_tiers, report_rows
from eval.fidelity.bench import FidelityBench, LaidOutQuestion
from eval.fidelity.outputs import write_report
from eval.fidelity.records import ResultLog
from eval.fidelity.run import RunProgress, run_questions
from eval.fidelity.settings import open_results
from eval.fidelity.summary import summarise
from eval.provenance import REPOSITORY, ModelIdentity, describe_code, describe_file, provenance
from inputs import INVENTED_PATH, Example, load_examples
from pipelines.cli.failures import INTERRUPTED
from pipelines.config import PipelineConfig, PrefixMode, make_config
from pipelines.models import DEFAULT_MODEL

DEFAULT_ARMS = "full,full-again,reuse,chunk_head:16,deviation:0.15,query:0.15,chunk_head+query:0.15"
RESULTS = Path("results")
"""Folder, in the current one, of results that are not sent elsewhere."""

app = typer.Typer(add_completion=False)


@app.command()
def musique(
    data: Annotated[
        Path,
        typer.Option(help="MuSiQue's JSON lines or CacheBlend's JSON array.", show_default="our invented questions"),
    ] = INVENTED_PATH,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; a second call with the same settings goes on.",
            show_default="results/ and the data file's name",
        ),
    ] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Take so many from the top; all by default.")] = None,
    arms: Annotated[
        str, typer.Option(help="full, full-again, reuse, or SELECTOR:PARAMETER as chunk_head:16 or query:0.15.")
    ] = DEFAULT_ARMS,
    tiers: Annotated[str, typer.Option(help="Where chunks are when asked for: warm, cold or warm,cold.")] = "warm",
    model: Annotated[str, typer.Option(help="A model folder, a hub id or bundled:NAME.")] = DEFAULT_MODEL,
    engine: Annotated[
        str, typer.Option(envvar="ENGINE", help="reference, or auto, which is the same so far.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    prefix: Annotated[PrefixMode, typer.Option(help="What chunks are encoded behind.")] = PrefixMode.SYSTEM,
    chunk_tokens: Annotated[int, typer.Option(help="Cut contexts longer than this, as pipelines do.")] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the order of arms and of the resampling.")] = 0,
    cache_dir: Annotated[Path | None, typer.Option(help="Keep chunk KV here; in memory by default.")] = None,
    host_gib: Annotated[float, typer.Option(min=0, help="GiB of chunk KV that host memory may hold.")] = 4.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away the results that --out holds.")] = False,
) -> None:
    """Answer questions over their own contexts with several arms; report fidelity, scores and times.

    Example: python -m eval.musique --questions 3
    """
    out = out or RESULTS / data.stem
    arguments = {**locals(), "prefix": prefix.value}
    with one_sentence_for_bad_input(), _resumable(out):
        config = make_config(
            model=model,
            engine=engine,
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
        examples = load_examples(data)[:questions]
        with _bench(config) as bench:
            typer.echo(_evaluate(bench, examples, rows, arguments), nl=False)


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; what was finished is in {out}, and the same command goes on from there", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _evaluate(bench: FidelityBench, examples: Sequence[Example], rows: Sequence[Row], arguments: dict[str, Any]) -> str:
    """Run what is missing, write the report, and return its tables."""
    asked, left_out = _lay_out(bench, examples)
    settings = _settings(bench, rows, arguments, len(asked), left_out)
    out, seed = arguments["out"], arguments["seed"]
    with open_results(out, settings, arguments["fresh"]) as log:
        _run(bench, asked, rows, log, seed)
        names = [question.example.id for question in asked]
        summary = summarise(log, names, rows, bench.kv_bytes_per_token, torch.get_num_threads(), seed)
    identity = ModelIdentity(arguments["model"], bench.fingerprint)
    account = provenance(arguments, identity, bench.config.device, seed, arguments["data"])
    return write_report(out, summary, account, settings, absolute=bench.config.device.startswith("cuda"))


def _lay_out(bench: FidelityBench, examples: Sequence[Example]) -> tuple[list[LaidOutQuestion], int]:
    """The questions that fit the model's context, and how many do not."""
    questions = [bench.lay_out(example) for example in examples]
    fitting = [question for question in questions if bench.fits(question)]
    if not fitting:
        raise EvalError("No question fits the model's context with its documents; choose a model of longer context.")
    return fitting, len(questions) - len(fitting)


def _settings(
    bench: FidelityBench, rows: Sequence[Row], arguments: dict[str, Any], questions: int, left_out: int
) -> dict[str, Any]:
    """Everything the results depend on."""
    config = bench.config
    return {
        "commit": describe_code(REPOSITORY)["commit"],
        "data": describe_file(arguments["data"]),
        "questions": questions,
        "left_out": left_out,
        "model_fingerprint": bench.fingerprint,
        "engine": bench.engine_name,
        "dtype": config.dtype,
        "device": config.device,
        "prefix": config.prefix.value,
        "system_prompt": config.system_prompt,
        "chunk_tokens": config.chunk_tokens,
        "arms": list(dict.fromkeys(row.arm.name for row in rows)),
        "tiers": list(dict.fromkeys(row.tier for row in rows)),
        "max_tokens": config.max_tokens,
        "seed": arguments["seed"],
    }


def _run(
    bench: FidelityBench, questions: Sequence[LaidOutQuestion], rows: Sequence[Row], log: ResultLog, seed: int
) -> None:
    columns = (TextColumn("{task.fields[name]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        asked = progress.add_task("", name="questions", total=len(questions))
        done = progress.add_task("", name="results", total=None)

        def show(state: RunProgress) -> None:
            progress.update(asked, completed=state.questions_done)
            progress.update(done, completed=state.results_done, total=state.results, description=state.doing)

        run_questions(bench, questions, rows, log, seed, show)


@contextmanager
def _bench(config: PipelineConfig) -> Iterator[FidelityBench]:
    bench = FidelityBench(config)
    try:
        yield bench
    finally:
        bench.close()


if __name__ == "__main__":
    app()
