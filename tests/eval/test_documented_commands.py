"""The measuring commands that README and Makefile show can be called as they are shown."""

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main

REPOSITORY = Path(__file__).parents[2]
IF_GIVEN = re.compile(r"\$\(if \$\((\w+)\),([^()]*)\$\(\1\)\)")
"""An option of a Makefile line that is there if its variable is."""
FILES = ("data", "ids", "retrieved")
"""Options that name a file, as DATA, IDS and RETRIEVED of the Makefile do."""
DRAWING, MAKING_DATA = "eval.speed_plots", "eval.calibration"


def shown(name: str) -> list[str]:
    """The `python -m eval...` lines of a file without their comments; Makefile lines without a file and with it."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    lines = [found.partition("#")[0].strip() for found in re.findall(r"python -m (eval\.[^`\n]*)", text)]
    return [IF_GIVEN.sub(option, line).strip() for line in lines for option in ("", r"\2some.jsonl")]


COMMANDS = sorted({*shown("README.md"), *shown("Makefile")})


def test_every_measuring_command_is_shown_in_the_readme_and_is_a_target() -> None:
    measuring = {
        "eval.musique",
        "eval.latency",
        "eval.retrieval",
        "eval.serve_check",
        "eval.scheduling",
        "eval.disk_bandwidth",
        "eval.trace",
    }
    assert {line.split()[0] for line in shown("README.md")} - {DRAWING, MAKING_DATA} == measuring
    assert {line.split()[0] for line in shown("Makefile")} == {*measuring, DRAWING}


def app_of(module: str) -> typer.Typer:
    """What `python -m module` runs."""
    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    app = import_module(f"{module}.__main__" if is_package else module).app
    assert isinstance(app, typer.Typer)
    return app


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_that_is_shown_has_every_option_it_needs(line: str) -> None:
    module, *arguments = shlex.split(line)
    command = typer.main.get_command(app_of(module))
    given = command.make_context(module, arguments).params
    files = {option: arguments[arguments.index(f"--{option}") + 1] for option in FILES if f"--{option}" in arguments}
    assert {option: str(given[option]) for option in files} == files


def test_a_file_that_is_named_to_make_reaches_its_command() -> None:
    lines = shown("Makefile")
    named = {option: {line.split()[0] for line in lines if f"--{option} some.jsonl" in line} for option in FILES}
    assert named == {
        "data": {"eval.musique", "eval.retrieval", "eval.trace"},
        "ids": {"eval.retrieval"},
        "retrieved": {"eval.musique"},
    }
    musique = [line for line in lines if line.startswith("eval.musique")]
    assert sum("--retrieved" in line for line in musique) == len(musique) / 2
