"""What was simulated, as JSON, as Markdown and as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from eval.report.table import markdown_table
from eval.statistics import Interval
from eval.trace.caching import CachingRow
from eval.trace.prefetching import PrefetchRow
from eval.trace.prefetching import table as prefetching_table

HEADER = ("capacity", "policy", "byte hit rate", "chunk hit rate", "prefill saved, s", "byte hit rate above LRU's")

READING = """\
Hit rates are shares of what prompts demanded. Capacities are shares of the bytes of all distinct documents. Means with
95 % bootstrap intervals over seeds, so over orders and times of arrival, not over other users. `clairvoyant` keeps what
is used again soonest (Belady's rule by bytes): a cache that could be, best possible where all documents have one size,
otherwise a heuristic that the optimum may pass. `bound` is a relaxation that no cache can pass, each number by itself.
`gdsf, advised` is told what the session predictor expects; nothing is prefetched in this table. Seconds saved take
the cost model's prefill for each cached document behind those before it, nothing of it recomputed.
"""


@dataclass(frozen=True, slots=True)
class Study:
    """One kind of traffic.

    Attributes:
        name: what it is, for people.
        notes: a sentence each on how it was made.
        caching: policies of eviction compared.
        prefetching: predictors compared; empty where the traffic has no sessions.
    """

    name: str
    notes: tuple[str, ...]
    caching: tuple[CachingRow, ...]
    prefetching: tuple[PrefetchRow, ...] = ()


def terminal_table(study: Study) -> Table:
    """Return the policies of a study as a table for the terminal: means, and the interval of what is gained."""
    table = Table(title=f"{study.name}: caching")
    for heading in HEADER:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in study.caching:
        capacity, policy, *measures, gain = _cells(row)
        means = (measure.partition(" ")[0] for measure in measures)
        table.add_row(capacity, policy, *means, gain, end_section=row.policy == study.caching[-1].policy)
    return table


def markdown(studies: Sequence[Study]) -> str:
    """Return all studies as one Markdown page."""
    parts = ["# Caching and prefetching on traces\n", READING]
    for study in studies:
        parts.append(f"## {study.name}\n")
        parts.append(" ".join(study.notes) + "\n")
        parts.append(markdown_table(HEADER, [_cells(row) for row in study.caching]))
        if study.prefetching:
            parts.append("Prefetching, by predictor:\n")
            parts.append(prefetching_table(study.prefetching) + "\n")
    return "\n".join(parts)


def write(folder: Path, studies: Sequence[Study], account: dict[str, Any]) -> None:
    """Write `trace.json` and `trace.md` into `folder`, which is made where it is missing.

    Args:
        folder: files of these names in it are replaced.
        studies: what was found.
        account: JSON-ready; how it was found.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = {**account, "studies": [asdict(study) for study in studies]}
    (folder / "trace.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder / "trace.md").write_text(markdown(studies), encoding="utf-8")


def _cells(row: CachingRow) -> tuple[str, ...]:
    rates = (_interval(row.byte_hit_rate, ".3f"), _interval(row.chunk_hit_rate, ".3f"))
    return (
        f"{row.capacity_share:.0%}",
        row.policy,
        *rates,
        _interval(row.saved_s, ".1f"),
        _interval(row.byte_hit_gain, "+.3f"),
    )


def _interval(interval: Interval, form: str) -> str:
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
