"""How a measurement ends that bad input stops: one sentence on stderr and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from eval.errors import EvalError
from pipelines.cli.failures import BAD_INPUT, ROOM_ERRORS, report_error


@contextmanager
def one_sentence_for_bad_input() -> Iterator[None]:
    """End the command with the message of any room's error.

    Raises:
        typer.Exit: with code 2.
    """
    try:
        yield
    except (EvalError, *ROOM_ERRORS) as error:
        report_error(error)
        raise typer.Exit(BAD_INPUT) from error
