"""Arms and tiers as the command line names them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.selectors import SELECTOR_NAMES, Selector, make_selector
from eval.errors import EvalError
from kvstore.tiers import Tier

FULL = "full"
FULL_AGAIN = "full-again"
PREFIX_CACHED = "prefix-cached"
REUSE = "reuse"
DRIFT = "drift"
TIER_NAMES = {"warm": Tier.HOST, "cold": Tier.DISK}

_PARAMETER = re.compile(r"\d+|\d*\.\d+")
_OTHER_NAMES = ("none", "full")
"""Selectors that are arms under names of their own."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to prefill the same prompt.

    Attributes:
        name: as it was asked for, for example `deviation:0.15`.
        selector: picks the rows to recompute; None is full prefill.
        carry_drift: whether the other rows are moved by the drift of those.
    """

    name: str
    selector: Selector | None
    carry_drift: bool = False

    @property
    def policy(self) -> Policy:
        """The policy that the engine is asked for."""
        return Policy.FULL if self.selector is None else Policy.BLEND

    @property
    def is_reference(self) -> bool:
        """Whether this is a full prefill of some kind: run once, whatever tiers are asked for."""
        return self.name in (FULL, FULL_AGAIN, PREFIX_CACHED)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report: an arm, and where its chunks are when a request comes (`warm` or `cold`)."""

    arm: Arm
    tier: str


def parse_arms(text: str) -> tuple[Arm, ...]:
    """Read a list of arms; `full` is always the first, asked for or not.

    Arms are separated by commas. `full` is full prefill. `full-again` is the noise floor: every row is computed
    again, but in other batches (on the reference engine the documents' rows in one, the question's in the next; on
    vLLM among other requests). `prefix-cached` is full prefill by an engine that caches prefixes. `reuse` recomputes
    nothing. Others are a selector with its parameters, each after a colon: a whole number is tokens of each
    chunk's head, a number with a decimal point is a ratio, as in `chunk_head:16`, `query:0.15` and
    `chunk_head+query:16:0.15`; `drift` moves the rows that are left alone, as in `query:0.15:drift`.

    Raises:
        EvalError: an arm is unknown, has parameters that do not fit it, or is named twice.
    """
    names = [name.strip() for name in text.split(",")]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise EvalError(f"Arm '{twice[0]}' is named twice; name each arm once.")
    arms = [_parse_arm(name) for name in names]
    return (Arm(FULL, None), *(arm for arm in arms if arm.name != FULL))


def parse_tiers(text: str) -> tuple[str, ...]:
    """Read a list of tiers, `warm`, `cold` or both.

    Raises:
        EvalError: a tier is unknown or named twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not set(names) <= TIER_NAMES.keys():
        raise EvalError(f"Tiers '{text}' cannot be run; use warm, cold or warm,cold.")
    return names


def report_rows(arms: Sequence[Arm], tiers: Sequence[str]) -> tuple[Row, ...]:
    """Every arm at every tier, in order; full prefill and its noise floor are there once."""
    return tuple(Row(arm, tier) for arm in arms for tier in (("warm",) if arm.is_reference else tiers))


def require_runnable(rows: Sequence[Row], on_vllm: bool) -> None:
    """Refuse, before a model is loaded, what its engine cannot do.

    Raises:
        EvalError: naming the arm or the tier, and the engine that can.
    """
    if on_vllm and any(TIER_NAMES[row.tier] is Tier.DISK for row in rows):
        raise EvalError("Cold chunks are measured on the engine `reference`; leave out the tier cold.")
    if not on_vllm and any(row.arm.name == PREFIX_CACHED for row in rows):
        raise EvalError(f"Arm '{PREFIX_CACHED}' needs --engine vllm: the engine `reference` caches no prefixes.")


def _parse_arm(name: str) -> Arm:
    if name == FULL:
        return Arm(name, None)
    if name == FULL_AGAIN:
        return Arm(name, make_selector("full"))
    if name == PREFIX_CACHED:
        return Arm(name, None)
    if name == REUSE:
        return Arm(name, make_selector("none"))
    selector, *parameters = name.split(":")
    carry_drift = DRIFT in parameters
    if carry_drift:
        # Once: one that is left makes a parameter that does not fit.
        parameters.remove(DRIFT)
    if selector not in SELECTOR_NAMES or selector in _OTHER_NAMES:
        known = ", ".join(
            [FULL, FULL_AGAIN, PREFIX_CACHED, REUSE, *(s for s in SELECTOR_NAMES if s not in _OTHER_NAMES)]
        )
        raise EvalError(f"Arm '{name}' is unknown; use {known}, with parameters as in chunk_head:16 or query:0.15.")
    wrong = [parameter for parameter in parameters if not _PARAMETER.fullmatch(parameter)]
    heads = [int(parameter) for parameter in parameters if "." not in parameter and parameter not in wrong]
    ratios = [float(parameter) for parameter in parameters if "." in parameter and parameter not in wrong]
    if wrong or len(heads) > 1 or len(ratios) > 1 or (heads and "chunk_head" not in selector):
        raise EvalError(
            f"Arm '{name}' has parameters that do not fit; give a ratio as 0.15 and, for chunk_head, tokens as 16."
        )
    if selector == "chunk_head" and heads and ratios:
        raise EvalError(f"Arm '{name}' asks for tokens and for a ratio; give chunk_head one of them.")
    try:
        return Arm(name, make_selector(selector, next(iter(ratios), None), next(iter(heads), None)), carry_drift)
    except BlendError as error:
        raise EvalError(f"Arm '{name}' cannot be run: {error}") from None
