"""The connector's settings, and the vLLM releases it is for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.vllm_backend.settings import ConnectorSettings, make_settings
from cacheblend.vllm_backend.versions import require_version


def test_nothing_given_is_the_defaults():
    made = make_settings({})
    assert made == ConnectorSettings()
    assert (made.store, made.policy, made.selector, made.ratio) == (None, Policy.BLEND, "query", None)
    assert (made.max_rows_per_step, made.attention, made.debug_rows) == (None, "auto", False)


def test_json_values_become_settings():
    made = make_settings(
        {
            "store": "/srv/chunks",
            "host_budget_bytes": 0,
            "policy": "auto",
            "selector": "deviation",
            "ratio": 0.2,
            "max_rows_per_step": 512,
            "attention": "runs",
            "debug_rows": True,
        }
    )
    assert made == ConnectorSettings(
        store=Path("/srv/chunks"),
        host_budget_bytes=0,
        policy=Policy.AUTO,
        selector="deviation",
        ratio=0.2,
        max_rows_per_step=512,
        attention="runs",
        debug_rows=True,
    )


def test_a_store_in_the_users_home_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_settings({"store": "~/chunks"}).store == tmp_path / "chunks"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", 7),
        ("host_budget_bytes", -1),
        ("host_budget_bytes", "much"),
        ("policy", "sometimes"),
        ("selector", None),
        ("ratio", 1.5),
        ("ratio", -0.1),
        ("max_rows_per_step", 0),
        ("attention", "flash"),
        ("debug_rows", "perhaps"),
        ("host_budget", 1),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence_with_its_name_and_value(name, value):
    with pytest.raises(BlendError) as raised:
        make_settings({name: value})
    message = str(raised.value)
    assert message.startswith(f"kv_connector_extra_config['{name}'] cannot be {value!r}: ")
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("version", ["0.24", "0.24.9", "0.34", "0.34.0", "0.34.1+cu130", "1.0.0", "0.9.2"])
def test_a_release_outside_the_supported_ones_is_refused_by_name(version):
    with pytest.raises(BlendError, match=r"install 0\.25 to 0\.33") as raised:
        require_version(version)
    assert f"vLLM {version} is not supported" in str(raised.value)


@pytest.mark.parametrize("version", ["0.25.0", "0.25.0+cu130", "0.28.0", "0.32.0", "0.32.0+cpu"])
def test_a_release_that_passes_the_gates_is_taken_in_silence_whatever_its_build(version, caplog):
    require_version(version)
    assert caplog.records == []


@pytest.mark.parametrize("version", ["0.26.0", "0.25.1", "0.33.9+cpu", "0.32.0.post1", "dev", "main-3f2a", ""])
def test_a_version_that_the_gates_did_not_run_on_is_warned_about_by_name(version, caplog):
    require_version(version)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert version in record.getMessage()
    assert "0.25.0, 0.27.1, 0.28.0, 0.29.0, 0.30.0, 0.31.0, 0.32.0" in record.getMessage()
