"""vLLM's general plugin."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from cacheblend.vllm_backend.plugin import register
from cacheblend.vllm_backend.settings import CONNECTOR_NAME


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_what_we_log_goes_where_vllm_logs_unless_the_application_has_handlers(monkeypatch, caplog):
    register()
    caplog.set_level(logging.INFO, logger="cacheblend")
    kept = Kept()
    theirs = logging.getLogger("vllm")
    monkeypatch.setattr(theirs, "handlers", [kept])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger("cacheblend.vllm_backend.connector").info("heard")
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    logging.getLogger("cacheblend.vllm_backend.connector").info("the application's")
    assert kept.messages == ["heard"]


def test_registering_twice_is_once():
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME).__name__ == CONNECTOR_NAME
