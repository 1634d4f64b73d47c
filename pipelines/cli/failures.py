"""How a command ends that cannot go on: one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import typer

from cacheblend.errors import BlendError
from inputs.errors import DatasetError
from kvstore.errors import StoreError
from pipelines.cli.output import printable
from pipelines.errors import ModelError, PipelineError
from retrieval.errors import RetrievalError

ROOM_ERRORS = (PipelineError, BlendError, ModelError, RetrievalError, DatasetError, StoreError)
"""What bad input raises; each message is one sentence for the user."""

BAD_INPUT = 2
INTERRUPTED = 130

R = TypeVar("R")


def report_error(error: Exception) -> None:
    """Print what was wrong as one line on stderr."""
    typer.echo(f"error: {printable(' '.join(str(error).split()))}", err=True)


def ends_with_a_sentence(command: Callable[..., R]) -> Callable[..., R]:
    """Make a command exit with 2 on the rooms' and the system's errors, and with 130 on Ctrl-C."""

    @functools.wraps(command)
    def guarded(*args: object, **options: object) -> R:
        try:
            return command(*args, **options)
        except ROOM_ERRORS as error:
            report_error(error)
            raise typer.Exit(BAD_INPUT) from error
        except BrokenPipeError:
            # Whoever read the output has left: typer ends the command without a word.
            raise
        except OSError as error:
            report_error(PipelineError(_sentence_of(error)))
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return guarded


def _sentence_of(error: OSError) -> str:
    if error.strerror is None:
        return str(error) or type(error).__name__
    if error.filename is None:
        return f"The operating system refused: {error.strerror}."
    return f"{error.filename} cannot be used: {error.strerror}."
