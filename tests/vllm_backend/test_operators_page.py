"""The page for operators names every setting, field, reason and counter that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cacheblend.vllm_backend.request_format import BlendParams
from cacheblend.vllm_backend.settings import ConnectorSettings
from kvstore.errors import UnavailableReason

PAGE = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")
NEVER_A_REQUESTS = {UnavailableReason.CANCELLED}
"""Told by transfers only; the chunk is then read through from disk."""


def table(head: str) -> dict[str, str]:
    """The rows of the table whose first heading is `head`: what each names first, and the next cell."""
    lines = PAGE.split(f"| {head} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {name: row[1] for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def test_the_settings_are_those_of_the_connector_with_their_defaults():
    rows = table("setting")
    assert list(rows) == list(ConnectorSettings.model_fields)
    defaults = ConnectorSettings()
    assert rows["host_budget_bytes"].startswith(str(defaults.host_budget_bytes))
    assert rows["policy"] == f"`{defaults.policy.value}`"
    assert rows["selector"] == f"`{defaults.selector}`"
    assert rows["attention"] == f"`{defaults.attention}`"
    assert rows["debug_rows"] == f"`{str(defaults.debug_rows).lower()}`"


def test_the_fields_of_a_plan_are_those_that_are_read():
    assert list(table("field of a plan")) == list(BlendParams.model_fields)


def test_every_reason_of_the_store_is_explained():
    named = {reason for reason in UnavailableReason if f"`{reason.value}`" in PAGE}
    assert set(UnavailableReason) - named == NEVER_A_REQUESTS


def test_the_counters_are_those_that_are_exported():
    pytest.importorskip("vllm")
    from cacheblend.vllm_backend.metrics import METRICS

    rows = table("counter")
    assert [name.removeprefix("vllm:cacheblend_").removesuffix("_total") for name in rows] == list(METRICS)
    assert [label.strip("`") or None for label in rows.values()] == [label for _, label in METRICS.values()]


def test_bytes_a_token_follow_from_the_shapes():
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if re.match(r"\| [A-Z]\S+-\d+[BM]", line)]
    assert len(rows) == 6
    for row in rows:
        layers, heads, dim, nbytes = (int(cell.replace(",", "")) for cell in row[1:5])
        assert nbytes == 2 * layers * heads * dim * 2, row
        assert row[5].strip() == f"{nbytes * 512 / 2**20:.1f} MiB"
        assert row[6].strip() == f"{nbytes * 512 * 1000 / 2**30:.1f} GiB"
