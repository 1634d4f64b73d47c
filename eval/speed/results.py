"""The result files of the GPU measurements, read for plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.fidelity.arms import DRIFT, FULL, FULL_AGAIN, PREFIX_CACHED, REUSE
from eval.statistics import Interval

TTFT_FILE, LONG_TTFT_FILE = "ttft.json", "ttft-18-chunks.json"
RATIO_FILE = "ratios.json"
REPEAT = "measure again with `make gpu-bench`"

ArmKey = tuple[str, float | None, int | None, bool]
"""Selector, ratio and tokens of heads, as far as they were asked for, and whether drift is carried."""


@dataclass(frozen=True, slots=True)
class ArmTime:
    """One blended arm of a run.

    Attributes:
        name: as the run calls it.
        key: what was asked for.
        ms: median milliseconds to first token.
        share_of_full: of full prefill's median.
        floor_ms: its floor in the same run.
        parts_ms: median milliseconds by stage of the blend.
        from_pool: whether its chunks came from the GPU pool.
    """

    name: str
    key: ArmKey
    ms: float
    share_of_full: float
    floor_ms: float
    parts_ms: dict[str, float]
    from_pool: bool


@dataclass(frozen=True, slots=True)
class TtftRun:
    """One run of `measure_ttft.py`.

    Attributes:
        device: its name.
        model: its name.
        prompt_tokens: of the prompt.
        full_ms: median milliseconds to first token of its full prefill.
        short_full_ms: the same of shorter prompts, by tokens.
        arms: blended ones.
    """

    device: str
    model: str
    prompt_tokens: int
    full_ms: float
    short_full_ms: dict[int, float]
    arms: list[ArmTime]


@dataclass(frozen=True, slots=True)
class ArmFidelity:
    """One arm of a fidelity report.

    Attributes:
        name: as the report calls it.
        key: what was asked for; None for full prefill of any kind.
        recomputed_ratio: 0 to 1.
        agreement: share of answers equal to full prefill's, 0 to 1.
        kl_first: KL(full || arm) of the first answer token, nats.
    """

    name: str
    key: ArmKey | None
    recomputed_ratio: float
    agreement: Interval
    kl_first: Interval


@dataclass(frozen=True, slots=True)
class FidelityRun:
    """A report of `eval.musique`.

    Attributes:
        model: its name.
        data: the name of the questions' file.
        questions: how many.
        arms: all but full prefill of any kind.
        noise_floor: full prefill against itself; None if it was not asked for.
    """

    model: str
    data: str
    questions: int
    arms: list[ArmFidelity]
    noise_floor: ArmFidelity | None


def read_ttft(path: Path) -> TtftRun:
    """Read a result of `measure_ttft.py`.

    Raises:
        EvalError: the file is missing, is no such result, or states no floors.
    """
    result = _read(path, f"{REPEAT}, or name the folder that holds it")
    return _taken(path, REPEAT, lambda: _ttft(result))


def read_shares(folder: Path) -> dict[ArmKey, float]:
    """Shares of full prefill's time to first token by arm, from the results in a folder; none from the GPU pool.

    Raises:
        EvalError: a result is missing or is none.
    """
    path = folder / RATIO_FILE
    # First what shares one run along a selector's ratios: within a line, times compare.
    shares: dict[ArmKey, float] = _taken(path, REPEAT, lambda: _ratio_shares(_read(path, REPEAT)))
    for arm in read_ttft(folder / TTFT_FILE).arms:
        if not arm.from_pool:
            shares.setdefault(arm.key, arm.share_of_full)
    return shares


def read_fidelity(path: Path) -> FidelityRun:
    """Read a report of `eval.musique`, `result.json`.

    Raises:
        EvalError: the file is missing or is no such report.
    """
    repeat = "name the result.json of a finished `python -m eval.musique`"
    result = _read(path, repeat)
    return _taken(path, repeat, lambda: _fidelity(result))


def _ttft(result: Mapping[str, Any]) -> TtftRun:
    arms = {name: numbers for name, numbers in result["arms"].items() if name != "full"}
    return TtftRun(
        device=result["device"],
        model=result["model"],
        prompt_tokens=result["prompt_tokens"],
        full_ms=result["arms"]["full"]["median_ms"],
        short_full_ms={int(n): ms for n, ms in result["measured_parts"]["full_prefill_ms"].items()},
        arms=[
            ArmTime(
                name=name,
                key=_key(numbers["options"]),
                ms=numbers["median_ms"],
                share_of_full=numbers["share_of_full"],
                floor_ms=numbers["floor_ms"],
                parts_ms=numbers["parts_ms"],
                from_pool="host" not in numbers["bytes_loaded"],
            )
            for name, numbers in arms.items()
        ],
    )


def _ratio_shares(result: Mapping[str, Any]) -> dict[ArmKey, float]:
    return {_key(row["options"]): row["share_of_full"] for row in result["ratios"]}


def _fidelity(result: Mapping[str, Any]) -> FidelityRun:
    rows = {row["name"]: _arm_fidelity(row) for row in result["rows"]}
    return FidelityRun(
        model=result["model"]["name"],
        data=result["data"]["name"],
        questions=result["questions"],
        arms=[arm for arm in rows.values() if arm.key is not None],
        noise_floor=rows.get(result["noise_floor"]),
    )


def _arm_fidelity(row: Mapping[str, Any]) -> ArmFidelity:
    selector, *parameters = row["name"].split(":")
    ratios = [float(parameter) for parameter in parameters if "." in parameter]
    heads = [int(parameter) for parameter in parameters if parameter.isdigit()]
    name = "none" if selector == REUSE else selector
    key = (name, next(iter(ratios), None), next(iter(heads), None), DRIFT in parameters)
    return ArmFidelity(
        name=row["name"],
        key=None if row["name"] in (FULL, FULL_AGAIN, PREFIX_CACHED) else key,
        recomputed_ratio=row["recomputed_ratio"],
        agreement=Interval(**row["agreement"]),
        kl_first=Interval(**row["kl_first"]),
    )


def _key(options: Mapping[str, Any]) -> ArmKey:
    return options["selector"], options.get("ratio"), options.get("head_tokens"), options.get("carry_drift", False)


def _read(path: Path, remedy: str) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EvalError(f"{path} cannot be read ({error.strerror}); {remedy}.") from error
    except ValueError as error:
        raise EvalError(f"{path} is no JSON ({error}); {remedy}.") from error
    if not isinstance(result, dict):
        raise EvalError(f"{path} holds no result; {remedy}.")
    return result


def _taken(path: Path, remedy: str, take: Any) -> Any:
    """What `take` returns; a key that the file lacks is the file's fault."""
    try:
        return take()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EvalError(f"{path} does not state what the plots need ({error}); {remedy}.") from error
