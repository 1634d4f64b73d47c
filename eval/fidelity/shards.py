"""Parts of a run: every n-th question, and no longer than some minutes."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from eval.errors import EvalError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th question, from the `number`-th on, counted from 1."""

    number: int = 1
    count: int = 1

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Its share of the items."""
        return items[self.number - 1 :: self.count]


def parse_shard(text: str) -> Shard:
    """Read `I/N`.

    Raises:
        EvalError: it is something else, or I is not among 1 to N.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise EvalError(f"Shard '{text}' cannot be run; give its number and how many there are, as 1/4.")
    return Shard(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class Clock:
    """Says when `minutes` are up, counted from when it is made; never where they are None."""

    minutes: float | None
    started: float = field(default_factory=time.monotonic)

    def is_up(self) -> bool:
        """Whether they are."""
        return self.minutes is not None and time.monotonic() - self.started >= self.minutes * 60
