"""Options that several commands share: groups of them as frozen dataclasses.

    @app.command()
    @takes_groups
    def ask(question: str, model: ModelOptions): ...

A command that takes a group gets one option for each of the group's fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from typer import Option

from pipelines.cli.units import parse_size, size_text
from pipelines.config import PipelineConfig

R = TypeVar("R")

NO_PRIMER = "none"

_DEFAULTS = {name: field.default for name, field in PipelineConfig.model_fields.items()}

Verbose = Annotated[bool, Option("--verbose", "-v", help="Log what happens, on stderr.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON, and nothing else, on stdout.")]
CacheDir = Annotated[Path | None, Option(help="Folder of chunk KV.", show_default="kv in the user cache")]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model runs, how, and where its chunk KV is kept."""

    model: Annotated[str, Option(help="bundled:NAME, a local folder or a hub id.")] = _DEFAULTS["model"]
    engine: Annotated[str, Option(envvar="ENGINE", help="auto, reference or vllm.")] = _DEFAULTS["engine"]
    dtype: Annotated[str, Option(help="float32 or bfloat16.")] = _DEFAULTS["dtype"]
    cache_dir: CacheDir = None
    verbose: Verbose = False


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """How documents are cut, and what their chunks are encoded behind; the same for precomputing and asking."""

    prefix: Annotated[str, Option(help="What chunks are encoded behind: system, bos or none.")] = _DEFAULTS["prefix"]
    primer: Annotated[
        str,
        Option(
            metavar="[auto|none|FILE]",
            help="Passages that chunks are encoded behind as well, for documents of one kind: auto chooses them from "
            "the documents, a file's are the same whatever documents there are.",
        ),
    ] = _DEFAULTS["primer"] or NO_PRIMER
    system_prompt: Annotated[str, Option(help="The instruction before the documents.")] = _DEFAULTS["system_prompt"]
    chunk_tokens: Annotated[int, Option(help="Tokens of a chunk at most.")] = _DEFAULTS["chunk_tokens"]
    chunk_overlap: Annotated[int, Option(help="Tokens repeated in the next chunk.")] = _DEFAULTS["chunk_overlap"]


@dataclass(frozen=True, slots=True)
class RetrievalOptions:
    """How chunks are found."""

    embedder: Annotated[str, Option(help="bundled:NAME, a local folder or a hub id.")] = _DEFAULTS["embedder"]
    index_dir: Annotated[
        Path | None, Option(help="Folder of retrieval indexes.", show_default="indexes in the user cache")
    ] = None


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How a prompt is blended and its answer drawn."""

    policy: Annotated[str, Option(help="full, blend or auto.")] = _DEFAULTS["policy"]
    selector: Annotated[
        str,
        Option(
            help="Which reused rows are recomputed: none, chunk_head, deviation, query, chunk_head+query, "
            "chunk_head+deviation or full."
        ),
    ] = _DEFAULTS["selector"]
    ratio: Annotated[
        float | None, Option(help="Share of reused rows to recompute, 0 to 1.", show_default="the selector's")
    ] = None
    fidelity: Annotated[
        str | None, Option(help="Instead of a ratio: fast, balanced or faithful.", show_default="the ratio")
    ] = None
    head_tokens: Annotated[
        int | None, Option(help="Rows recomputed at each chunk's head.", show_default="the selector's")
    ] = None
    carry_drift: Annotated[bool, Option(help="Move the rows that are not recomputed with those that are.")] = _DEFAULTS[
        "carry_drift"
    ]
    top_k: Annotated[int, Option(help="Chunks retrieved for a question.")] = _DEFAULTS["top_k"]
    host_budget_bytes: Annotated[
        int,
        Option(
            "--host-budget",
            parser=parse_size,
            metavar="SIZE",
            show_default=size_text(_DEFAULTS["host_budget_bytes"]),
            help="KV that host memory may hold.",
        ),
    ] = _DEFAULTS["host_budget_bytes"]
    max_tokens: Annotated[int, Option(help="New tokens of an answer at most.")] = _DEFAULTS["max_tokens"]
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int | None, Option(help="Of sampling; without one every run differs.")] = None
    stop: Annotated[list[str] | None, Option(help="Text that ends the answer; may be repeated.")] = None
    no_retrieval: Annotated[bool, Option("--no-retrieval", help="Use all documents, in the order given.")] = False


def settings_of(*groups: Any) -> dict[str, Any]:
    """What these groups say about `PipelineConfig`; options left out are not in it."""
    options = {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}
    settings = {name: value for name, value in options.items() if name in _DEFAULTS and value is not None}
    if settings.get("primer") == NO_PRIMER:
        settings["primer"] = None
    return settings


def takes_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Let a command take groups of options: typer sees their fields, the command gets the groups."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters.extend(_parameters_of(groups[parameter.name]))
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_groups(**options: Any) -> R:
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)})
        return command(**options)

    with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_groups


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
