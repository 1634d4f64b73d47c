"""vLLM's general plugin: makes `--kv-transfer-config '{"kv_connector": "CacheBlendConnector", ...}'` enough."""

from __future__ import annotations

import logging

from vllm import ModelRegistry
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from cacheblend.vllm_backend.settings import CONNECTOR_NAME

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_registered = False


def register() -> None:
    """Register the connector and the architectures it blends; vLLM calls this in each of its processes."""
    global _registered
    if _registered:
        return
    _registered = True
    _log_as_vllm_does()
    KVConnectorFactory.register_connector(CONNECTOR_NAME, "cacheblend.vllm_backend.connector", CONNECTOR_NAME)
    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"cacheblend.vllm_backend.live_model:Noted{name}")


class _ToVllm(logging.Handler):
    """Hands our records to vLLM's logger, whose handlers are set up late and sometimes anew."""

    def emit(self, record: logging.LogRecord) -> None:
        """Leave it to the application where that has set up logging: the record reaches it anyway."""
        if not logging.getLogger().handlers:
            logging.getLogger("vllm").handle(record)


def _log_as_vllm_does() -> None:
    """vLLM sets up its own logger only, and ours would not be heard."""
    for name in ("cacheblend", "kvstore"):
        ours = logging.getLogger(name)
        ours.addHandler(_ToVllm())
        if ours.level == logging.NOTSET and not logging.getLogger().handlers:
            # vLLM's handlers have a level of their own; an application that has set up logging keeps its own.
            ours.setLevel(logging.INFO)
