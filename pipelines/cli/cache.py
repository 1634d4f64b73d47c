"""`cacheblend cache`: what is in the cache folder, whether it is sound, making room; and a running server's."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from typer import Option

from pipelines.cli.budget import budget
from pipelines.cli.cache_listing import Listing, list_chunks
from pipelines.cli.failures import ends_with_a_sentence
from pipelines.cli.options import AsJson, CacheDir, Verbose
from pipelines.cli.output import log_to_stderr, print_json, print_table
from pipelines.cli.progress import tracked
from pipelines.cli.top import top
from pipelines.cli.units import parse_duration, parse_size, size_text
from pipelines.errors import PipelineError
from pipelines.models.cache import cache_home

if TYPE_CHECKING:
    from kvstore.disk import DiskTier
    from kvstore.upkeep import Problem

PROBLEMS_FOUND = 1
SHORT = 12

app = typer.Typer(
    help="List, verify and prune the cached chunks; watch and steer a running server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("top")(top)
app.command("budget")(budget)


@app.command("ls")
@ends_with_a_sentence
def list_command(
    cache_dir: CacheDir = None,
    chunks: Annotated[bool, Option("--chunks", help="List each chunk.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show what is cached, for each model and prefix.

    \b
    Example:
      cacheblend cache ls
    """
    tier = _open(cache_dir, verbose)
    listing = list_chunks(tier)
    if as_json:
        print_json({"cache_dir": str(tier.root), **listing.to_dict(with_chunks=chunks)})
        return
    print_table(_groups_table(listing))
    if chunks:
        print_table(_chunks_table(listing))
    if listing.unreadable:
        typer.echo(f"{listing.unreadable} files have no sound header; `cacheblend cache verify` says why.")
    if listing.quarantined_bytes:
        typer.echo(f"{size_text(listing.quarantined_bytes)} are in quarantine; `cacheblend cache prune` removes them.")


@app.command()
@ends_with_a_sentence
def verify(
    cache_dir: CacheDir = None,
    fix: Annotated[bool, Option("--fix", help="Set damaged files aside in quarantine.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Read and verify every file; exit with 1 if one would not be served.

    A file that is not damaged but of another format version, or cannot be read now, is listed and left alone. What
    killed writers left behind is removed whenever a cache folder is opened.

    \b
    Example:
      cacheblend cache verify
    """
    from kvstore import upkeep

    tier = _open(cache_dir, verbose)
    files = list(tier.files())
    leftovers = upkeep.find_leftovers(tier.temp_files())
    problems = leftovers + upkeep.find_damage(tracked(files, "Verifying", len(files)))
    if fix:
        _fix(tier, problems)
    if as_json:
        found = [
            {"path": str(p.path), "reason": p.reason.value, "detail": p.detail, "left_alone": _is_left_alone(p)}
            for p in problems
        ]
        print_json({"cache_dir": str(tier.root), "files": len(files), "problems": found, "fixed": fix})
    else:
        for problem in problems:
            note = " (left alone)" if _is_left_alone(problem) else ""
            typer.echo(f"{problem.path}: {problem.reason.value}: {problem.detail}{note}")
        typer.echo(_verdict(len(files), problems, fix))
    if problems:
        raise typer.Exit(PROBLEMS_FOUND)


@app.command()
@ends_with_a_sentence
def prune(
    cache_dir: CacheDir = None,
    max_bytes: Annotated[
        int | None, Option(parser=parse_size, metavar="SIZE", help="Keep at most this much, e.g. 10GiB.")
    ] = None,
    older_than: Annotated[
        float | None,
        Option(parser=parse_duration, metavar="AGE", help="Remove what was not read from disk for e.g. 30d."),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Remove chunks, least recently used first, and whatever is in quarantine.

    A chunk is used when it is written or read from disk; being served from a process's memory does not count.
    Without --max-bytes and --older-than only what is in quarantine goes.

    \b
    Example:
      cacheblend cache prune --max-bytes 10GiB --older-than 30d
    """
    tier = _open(cache_dir, verbose)
    report = tier.prune(max_bytes, older_than)
    left = tier.bytes_used()
    if as_json:
        print_json(
            {
                "cache_dir": str(tier.root),
                "removed": list(report.keys),
                "freed_bytes": report.nbytes,
                "left_bytes": left,
            }
        )
        return
    for key in report.keys:
        typer.echo(f"removed {key[:SHORT]}")
    typer.echo(f"{len(report.keys):,} chunks removed, {size_text(report.nbytes)} freed, {size_text(left)} left.")


def _open(cache_dir: Path | None, verbose: bool) -> DiskTier:
    from kvstore.disk import DiskTier

    log_to_stderr(verbose)
    root = cache_dir or cache_home() / "kv"
    if not root.exists():
        raise PipelineError(f"There is no cache folder {root}; precompute-chunk-cache makes and fills one.")
    return DiskTier(root)


def _fix(tier: DiskTier, problems: list[Problem]) -> None:
    from kvstore import upkeep

    upkeep.remove_leftovers(problem.path for problem in problems if problem.removable)
    for problem in problems:
        if problem.damaged:
            tier.quarantine(problem.path, problem.reason, problem.detail)


def _is_left_alone(problem: Problem) -> bool:
    return not (problem.damaged or problem.removable)


def _verdict(files: int, problems: list[Problem], fix: bool) -> str:
    if not problems:
        return f"{files:,} files verified, nothing wrong."
    counts = Counter(problem.reason.value for problem in problems)
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return f"{files:,} files verified, {len(problems):,} not served ({reasons}): {_remedy(problems, fix)}."


def _remedy(problems: list[Problem], fix: bool) -> str:
    left_alone = sum(map(_is_left_alone, problems))
    to_fix = len(problems) - left_alone
    parts = []
    if to_fix:
        parts.append(f"{to_fix:,} set aside" if fix else f"--fix sets {to_fix:,} aside")
    if left_alone:
        parts.append(f"{left_alone:,} left alone")
    return ", ".join(parts)


def _groups_table(listing: Listing) -> Table:
    table = Table(show_footer=True)
    groups = listing.groups()
    totals = [sum(g.chunks for g in groups), sum(g.tokens for g in groups), sum(g.nbytes for g in groups)]
    table.add_column("model", footer="total")
    table.add_column("dtype")
    table.add_column("prefix tokens", justify="right")
    table.add_column("chunks", justify="right", footer=f"{totals[0]:,}")
    table.add_column("tokens", justify="right", footer=f"{totals[1]:,}")
    table.add_column("size", justify="right", footer=size_text(totals[2]))
    for group in groups:
        table.add_row(
            group.fingerprint[:SHORT],
            group.dtype,
            f"{group.prefix_tokens:,}",
            f"{group.chunks:,}",
            f"{group.tokens:,}",
            size_text(group.nbytes),
        )
    return table


def _chunks_table(listing: Listing) -> Table:
    table = Table()
    table.add_column("chunk")
    table.add_column("model")
    for name in ("prefix tokens", "tokens", "shards", "size"):
        table.add_column(name, justify="right")
    table.add_column("last used")
    for entry in listing.chunks:
        table.add_row(
            entry.key[:SHORT],
            entry.fingerprint[:SHORT],
            f"{len(entry.prefix_ids):,}",
            f"{entry.tokens:,}",
            str(entry.shards),
            size_text(entry.nbytes),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.last_used)),
        )
    return table
