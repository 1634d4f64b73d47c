"""Progress of long stages, on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def stage(description: str) -> Iterator[None]:
    """Show a spinner and the time elapsed while the body runs; without a terminal, one line at its end."""
    columns = (SpinnerColumn(finished_text="-"), TextColumn("{task.description}"), TimeElapsedColumn())
    # The stream is bound now, so that a body may redirect sys.stderr without taking the spinner along.
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, redirect_stderr=False) as progress:
        task = progress.add_task(description, total=1)
        yield
        progress.update(task, completed=1)
