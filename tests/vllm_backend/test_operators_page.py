"""The page for operators names every setting, field, reason and counter that there is, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cacheblend.scheduling.admission_policy import FULL_CHEAPER, LOAD_SLOWER
from cacheblend.vllm_backend.request_format import BlendParams, BudgetParams, parse_params
from cacheblend.vllm_backend.settings import ConnectorSettings
from kvstore.errors import StoreError, UnavailableReason
from kvstore.gpu import require_free

PAGE = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")


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
    assert rows["gpu_pool_bytes"] == f"`{defaults.gpu_pool_bytes}`"
    assert rows["eviction"] == f"`{defaults.eviction}`"
    assert rows["prediction"] == f"`{str(defaults.prediction).lower()}`"
    assert rows["accept_budgets"] == f"`{str(defaults.accept_budgets).lower()}`"
    assert rows["graph_rows"] == f"`{defaults.graph_rows}`"
    assert rows["debug_rows"] == f"`{str(defaults.debug_rows).lower()}`"


def test_the_fields_of_a_plan_are_those_that_are_read():
    assert list(table("field of a plan")) == list(BlendParams.model_fields)


def test_every_reason_of_the_store_is_explained():
    assert [reason for reason in UnavailableReason if f"`{reason.value}`" not in PAGE] == []


def test_every_reason_of_auto_is_explained():
    rows = table("reason of a chunk")
    assert {FULL_CHEAPER, LOAD_SLOWER} <= set(rows)


def test_the_counters_and_their_labels_are_those_that_are_exported():
    pytest.importorskip("vllm")
    from cacheblend.vllm_backend.metrics import METRICS

    rows = table("counter")
    assert [name.removeprefix("vllm:cacheblend_").removesuffix("_total") for name in rows] == list(METRICS)
    assert [labels_in(cell) for cell in rows.values()] == [labels for _, labels in METRICS.values()]


def test_the_gauges_and_their_labels_are_those_that_are_exported():
    pytest.importorskip("vllm")
    from cacheblend.vllm_backend.metrics import GAUGES

    rows = table("gauge")
    assert [name.removeprefix("vllm:cacheblend_") for name in rows] == list(GAUGES)
    assert [labels_in(cell) for cell in rows.values()] == [labels for _, labels in GAUGES.values()]


def test_the_budgets_that_the_page_shows_are_read_as_such():
    shown = re.search(r'`(\{"cacheblend": \{"version": 1, "budgets": \{"host": \d+\}\}\})`', PAGE)
    assert shown is not None
    assert isinstance(parse_params(json.loads(shown[1])), BudgetParams)


def test_the_sentence_on_a_pool_that_does_not_fit_is_the_stores_own():
    shown = next(line for line in PAGE.splitlines() if line.startswith("A GPU pool of "))
    asked, free, total = (int(number) for number in re.findall(r"\d{6,}", shown))
    with pytest.raises(StoreError, match=re.escape(shown)):
        require_free(asked, free, total, ours=total - free)


def test_what_the_page_calls_the_buffers_of_a_blend_is_what_they_take():
    pytest.importorskip("vllm")
    from cacheblend.vllm_backend.drift import drift_bytes
    from cacheblend.vllm_backend.executor import workspace_rows
    from cacheblend.vllm_backend.placement import staging_bytes

    shape = SimpleNamespace(kv_heads=8, head_dim=128, dtype=torch.bfloat16, num_layers=32)
    assert staging_bytes(workspace_rows(8192, 8192), shape) == 1 << 30
    assert drift_bytes(8192, shape.kv_heads, shape.head_dim) == 64 << 20
    assert "`max_num_batched_tokens` 8192, 1 GiB and 64 MiB)" in PAGE


def labels_in(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def test_bytes_a_token_follow_from_the_shapes():
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if re.match(r"\| [A-Z]\S+-\d+[BM]", line)]
    assert len(rows) == 6
    for row in rows:
        layers, heads, dim, nbytes = (int(cell.replace(",", "")) for cell in row[1:5])
        assert nbytes == 2 * layers * heads * dim * 2, row
        assert row[5].strip() == f"{nbytes * 512 / 2**20:.1f} MiB"
        assert row[6].strip() == f"{nbytes * 512 * 1000 / 2**30:.1f} GiB"
