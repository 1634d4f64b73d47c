"""Rounds in which every run takes its turn in random order; a run that fails ends alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM_UP = 3

Run = Callable[[], tuple[float, dict[str, Any]]]
"""One request: its milliseconds and its account, empty without a plan."""


@dataclass(slots=True)
class Taken:
    """What one run's turns came to.

    Attributes:
        ms: milliseconds, one a counted turn.
        accounts: of the same turns.
        error: why it ended early; None if it did not.
    """

    ms: list[float] = field(default_factory=list)
    accounts: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Runs that need the same state of the engine.

    Attributes:
        enter: brings the state about, at the setting's turn of each round.
        runs: by name.
    """

    enter: Callable[[], None]
    runs: Mapping[str, Run]


def interleave(settings: Sequence[Setting], rounds: int, on_round: Callable[[int], None]) -> dict[str, Taken]:
    """Run everything once a round, settings in random order and runs in random order within, after three rounds more.

    Args:
        settings: with runs whose names differ.
        rounds: that count.
        on_round: called with the number of each round that counted, from 1 on.

    Returns:
        What came of each run, by name. A run that raises, or whose setting cannot be entered, has an error and takes
        no further turns; the others go on.
    """
    taken = {name: Taken() for setting in settings for name in setting.runs}
    for number in range(-WARM_UP, rounds):
        drawn = random.Random(number)
        for setting in drawn.sample(settings, len(settings)):
            _take_turns(setting, taken, drawn, number >= 0)
        if number >= 0:
            on_round(number + 1)
    return taken


def _take_turns(setting: Setting, taken: Mapping[str, Taken], drawn: random.Random, counts: bool) -> None:
    left = [name for name in setting.runs if taken[name].error is None]
    if not left:
        return
    try:
        setting.enter()
    # A script's helpers end it by SystemExit, which here ends no more than these runs.
    except (Exception, SystemExit) as error:
        for name in left:
            taken[name].error = repr(error)
        return
    for name in drawn.sample(left, len(left)):
        try:
            milliseconds, account = setting.runs[name]()
        except Exception as error:
            taken[name].error = repr(error)
            continue
        if counts:
            taken[name].ms.append(milliseconds)
            taken[name].accounts.append(account)
