"""Sizes and durations as they are typed, and text that is safe to print."""

import pytest
import typer

from pipelines.cli.output import printable
from pipelines.cli.units import parse_duration, parse_size, size_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1000000", 10**6),
        ("10B", 10),
        ("4GiB", 4 << 30),
        ("512m", 512 << 20),
        ("1.5 MB", 1_500_000),
        ("2K", 2048),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("2W", 1209600)]
)
def test_a_duration_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "much", "-1", "4 G iB", "1e9", "4GiBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "7", "yesterday", "-1d", "1y"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_duration(text)


def test_sizes_are_shown_in_binary_units() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1,023 B", "1.5 KiB", "5.0 GiB"]


def test_control_characters_are_shown_and_everything_else_is_kept() -> None:
    assert (
        printable("a\x1b[31m\0\x9b\n\tb")
        == "a\N{REPLACEMENT CHARACTER}[31m" + "\N{REPLACEMENT CHARACTER}" * 2 + "\n\tb"
    )
    kept = "\N{FAMILY}\N{ZERO WIDTH JOINER} שלום é"
    assert printable(kept) == kept
