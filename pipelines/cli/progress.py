"""Progress bars, on stderr; without a terminal, one line at their end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipelines.cli.output import STDERR
from pipelines.cli.units import size_text
from pipelines.precompute import PrecomputeProgress

T = TypeVar("T")


class PrecomputeBar:
    """A bar over the chunks of a precomputation, with its tokens a second and bytes of KV.

    Args:
        disable: show nothing.
    """

    def __init__(self, disable: bool = False) -> None:
        columns = (
            TextColumn("Precomputing"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("chunks  {task.fields[rate]}  {task.fields[kv_bytes]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=STDERR, disable=disable)
        self._task = self._progress.add_task("", total=None, rate="", kv_bytes="")
        self._first: PrecomputeProgress | None = None
        self._started = 0.0

    def update(self, progress: PrecomputeProgress) -> None:
        """Show how far it is."""
        if self._first is None:
            self._first, self._started = progress, time.perf_counter()
        seconds = time.perf_counter() - self._started
        computed = progress.tokens_done - self._first.tokens_done
        self._progress.update(
            self._task,
            total=progress.chunks,
            completed=progress.chunks_done,
            rate=f"{computed / seconds:,.0f} tokens/s" if computed else "",
            kv_bytes=size_text(progress.kv_bytes),
        )

    def __enter__(self) -> PrecomputeBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def tracked(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """The items, with a bar over them while they are taken."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=STDERR) as progress:
        yield from progress.track(items, total=total, description=description)
