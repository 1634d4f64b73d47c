"""One call of the evaluation: gates, questions, and a report of all that is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.errors import EvalError
from eval.fidelity.arms import Row
from eval.fidelity.bench import FidelityBench, LaidOutQuestion
from eval.fidelity.gates import judge_gates, run_gates
from eval.fidelity.outputs import write_report
from eval.fidelity.priming import describe_primer
from eval.fidelity.records import ResultLog
from eval.fidelity.run import RunProgress, run_questions
from eval.fidelity.settings import code_digest, open_results
from eval.fidelity.shards import Clock, Shard
from eval.fidelity.summary import finished_questions, summarise
from eval.fidelity.vllm_bench import VllmBench
from eval.provenance import REPOSITORY, ModelIdentity, describe_file, provenance
from eval.retrieved import describe_retrieved
from inputs import Example


def evaluate(
    bench: FidelityBench,
    examples: Sequence[Example],
    rows: Sequence[Row],
    arguments: dict[str, Any],
    part: Shard,
    clock: Clock,
) -> str:
    """Run what is missing, write the reports, and return the tables of all that is finished.

    Args:
        bench: the model.
        examples: the questions of the run.
        rows: of the report, `full` among them.
        arguments: the command's, by name.
        part: the questions that this call asks.
        clock: when it ends.

    Raises:
        EvalError: no question fits the model, a gate does not hold, or `out` cannot be used.
    """
    asked, left_out = _lay_out(bench, examples)
    settings = _settings(bench, rows, arguments, len(asked), left_out)
    out = arguments["out"]
    with open_results(out, settings, arguments["fresh"]) as log:
        _run(bench, asked, part, rows, log, arguments["seed"], clock)
        # Shards that run at the same time: the report of the last one to end is the whole run's.
        log.catch_up()
        names = set(finished_questions(log, [question.example.id for question in asked], rows))
        finished = [question for question in asked if question.example.id in names]
        if len(finished) < len(asked):
            left = f"{len(finished)} of {len(asked)} questions are finished"
            typer.echo(f"{left}; the same command, or its next shard, goes on from there", err=True)
        if not finished:
            return ""
        later = {example.id for example in examples[(arguments["apart"] or len(examples)) - 1 :]}
        if arguments["apart"] and (alone := [question for question in finished if question.example.id in later]):
            folder = out / f"from-{arguments['apart']}"
            folder.mkdir(exist_ok=True)
            _report(folder, bench, log, alone, rows, arguments, settings)
        return _report(out, bench, log, finished, rows, arguments, settings)


def _report(
    folder: Path,
    bench: FidelityBench,
    log: ResultLog,
    questions: Sequence[LaidOutQuestion],
    rows: Sequence[Row],
    arguments: dict[str, Any],
    settings: dict[str, Any],
) -> str:
    seed = arguments["seed"]
    gates = judge_gates(log, bench.config.dtype)
    names = [question.example.id for question in questions]
    summary = summarise(
        log, names, rows, bench.kv_bytes_per_token, torch.get_num_threads(), seed, gates, arguments["against"]
    )
    if settings.get("in_flight", 1) > 1:
        summary = replace(summary, timing_is_void=True)
    if bench.priming is not None:
        summary = replace(summary, questions_with_primer_chunks=sum(map(bench.has_primer_chunk, questions)))
    identity = ModelIdentity(arguments["model"], bench.fingerprint)
    account = provenance(arguments, identity, bench.device, seed, arguments["data"])
    return write_report(folder, summary, account, settings, absolute=bench.device.startswith("cuda"))


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
        "code": code_digest(REPOSITORY),
        "data": describe_file(arguments["data"]),
        "retrieved": None if arguments["retrieved"] is None else describe_retrieved(arguments["retrieved"]),
        "questions": questions,
        "left_out": left_out,
        "model_fingerprint": bench.fingerprint,
        "engine": bench.engine_name,
        "dtype": config.dtype,
        "device": bench.device,
        "prefix": config.prefix.value,
        "primer": None if bench.priming is None else describe_primer(bench.priming, bench.prefixes),
        "system_prompt": config.system_prompt,
        "chunk_tokens": config.chunk_tokens,
        "arms": list(dict.fromkeys(row.arm.name for row in rows)),
        "tiers": list(dict.fromkeys(row.tier for row in rows)),
        "max_tokens": config.max_tokens,
        "seed": arguments["seed"],
        **_settings_of_vllm(bench, arguments),
    }


def _settings_of_vllm(bench: FidelityBench, arguments: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(bench, VllmBench):
        return {}
    return {"in_flight": arguments["in_flight"], "engine_options": bench.config.engine_options}


def _run(
    bench: FidelityBench,
    questions: Sequence[LaidOutQuestion],
    part: Shard,
    rows: Sequence[Row],
    log: ResultLog,
    seed: int,
    clock: Clock,
) -> None:
    mine = part.of(questions)
    columns = (TextColumn("{task.fields[name]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        asked = progress.add_task("", name="questions", total=len(mine))
        done = progress.add_task("", name="results", total=None)

        def show(state: RunProgress) -> None:
            progress.update(asked, completed=state.questions_done)
            progress.update(done, completed=state.results_done, total=state.results, description=state.doing)

        if not bench.is_gated_elsewhere:
            for doing in run_gates(bench, questions, log):
                progress.update(done, description=doing)
            judge_gates(log, bench.config.dtype)
        run_questions(bench, mine, rows, log, seed, show, clock.is_up)
