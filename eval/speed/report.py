"""A latency run as values for JSON and as text: ratios, and shares of full prefill's time."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
import typer
from rich.table import Table

from eval.speed.measure import ArmTimes, SpeedRun
from pipelines.cli.output import print_table

PARTS = ("load", "relocate", "score", "recompute", "question")


def speed_values(run: SpeedRun) -> dict[str, Any]:
    """What was measured, JSON-ready."""
    full = run.arms[0]
    return {
        "prompt_tokens": run.prompt_tokens,
        "kv_bytes_per_token": run.kv_bytes_per_token,
        "kv_build_seconds": run.build_seconds,
        "cpu_time_over_wall_time": run.share.over_wall,
        "void": run.share.void,
        "full_over_stock_transformers": median(run.stock_ms) / full.median_ms,
        "arms": [_arm_values(arm, full) for arm in run.arms],
    }


def print_speed(run: SpeedRun) -> None:
    """Print what was measured, and whether it is void."""
    full = run.arms[0]
    print_table(_table(run))
    typer.echo("Parts are shares of full prefill's time to first token; medians.")
    typer.echo(f"Full prefill by transformers alone takes {median(run.stock_ms) / full.median_ms:.2f} of ours.")
    typer.echo(
        f"KV: {run.kv_bytes_per_token} bytes a token, built once in "
        f"{run.build_seconds * 1e3 / full.median_ms:.2f} of a full prefill's time."
    )
    typer.echo(f"CPU time over wall time: {run.share.over_wall:.2f} with {torch.get_num_threads()} threads.")
    if run.share.void:
        typer.echo("VOID: the processors were not free while this ran; repeat it on an idle machine.")


def _arm_values(arm: ArmTimes, full: ArmTimes) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "full_over_arm": full.median_ms / arm.median_ms,
        "parts_share_of_full": {part: median(ms) / full.median_ms for part, ms in arm.parts_ms.items()},
        "recomputed_tokens": arm.recomputed_tokens,
        "recomputed_ratio": arm.recomputed_ratio,
        "first_tokens_agree": len(arm.first_tokens) == 1,
        "first_token_is_fulls": arm.first_tokens == full.first_tokens,
        "ttft_share_of_full": [ms / full.median_ms for ms in arm.ttft_ms],
    }


def _table(run: SpeedRun) -> Table:
    full = run.arms[0]
    table = Table(title=f"{run.prompt_tokens} prompt tokens, {run.chunks} chunks warm in host memory")
    table.add_column("arm")
    for heading in ("TTFT full / arm", "recomputed", *PARTS):
        table.add_column(heading, justify="right")
    for arm in run.arms:
        parts = [f"{median(arm.parts_ms[p]) / full.median_ms:.1%}" if p in arm.parts_ms else "" for p in PARTS]
        table.add_row(arm.name, f"{full.median_ms / arm.median_ms:.2f}", str(arm.recomputed_tokens), *parts)
    return table
