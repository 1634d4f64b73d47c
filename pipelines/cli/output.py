"""Where the commands write: results on stdout, progress and logs on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

STDERR = Console(stderr=True, markup=False, highlight=False)
"""Shared by progress bars and logs, so that log lines appear above a running bar."""

PIPED_WIDTH = 120


def log_to_stderr(verbose: bool) -> None:
    """Show warnings, and with `verbose` also what the rooms report of their work."""
    handler = RichHandler(console=STDERR, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    _hush_vllm(verbose)
    for room in ("cacheblend", "kvstore", "retrieval", "pipelines", "inputs"):
        logging.getLogger(room).setLevel(logging.INFO if verbose else logging.WARNING)
    if not verbose:
        _silence_transformers()


def print_json(value: Any) -> None:
    """Print one JSON value on a line of its own."""
    typer.echo(json.dumps(value, ensure_ascii=False, default=str))


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or `PIPED_WIDTH` columns where there is none."""
    _stdout().print(table)


def print_lines(lines: Sequence[str], heading: str, indent: str = "  ") -> None:
    """Print lines below a heading, each cut to the width that a table may have."""
    console = _stdout()
    console.print(heading)
    for line in lines:
        console.print(indent + line, no_wrap=True, overflow="ellipsis")


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control characters, which could steer a terminal, shown as U+FFFD, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) == "Cc" and character not in keep else character
        for character in text
    )


def on_one_line(text: str) -> str:
    """The text with every run of white space as one space, safe to print."""
    return printable(" ".join(text.split()))


def _stdout() -> Console:
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def _silence_transformers() -> None:
    """Keep its progress bars and advice out of a command's own."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _hush_vllm(verbose: bool) -> None:
    """Have vLLM and its processes, which are told by the environment, log on stderr and only what matters."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if not verbose:
        # Its warnings speak of its own defaults; what concerns the user is raised.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
