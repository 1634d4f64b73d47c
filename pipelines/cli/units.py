"""Sizes and durations as people write them."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([SMHDW])", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"S": 1, "M": 60, "H": 3600, "D": 86400, "W": 604800}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `4GiB`, `512M` (both binary), `500MB` (decimal) or `1000000`.

    Raises:
        typer.BadParameter: for anything else.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is not a size; write one such as 4GiB, 500MB or a number of bytes.")
    number, unit, suffix = match.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    return int(float(number) * base ** _POWERS[unit.upper()]) if unit else int(float(number))


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `45s`, `30m`, `12h`, `7d` or `2w`.

    Raises:
        typer.BadParameter: for anything else.
    """
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is not a duration; write one such as 45s, 30m, 12h, 7d or 2w.")
    return float(match[1]) * _SECONDS[match[2].upper()]


def size_text(nbytes: float) -> str:
    """A size for people, in binary units: `1.5 MiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:,.0f} {units[0]}" if units[0] == "B" else f"{nbytes:,.1f} {units[0]}"
