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


def _log_as_vllm_does() -> None:
    """vLLM sets up its own logger only; ours take over its handlers, unless the application has given them some."""
    theirs = logging.getLogger("vllm")
    for name in ("cacheblend", "kvstore"):
        ours = logging.getLogger(name)
        if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False
