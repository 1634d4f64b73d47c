"""vLLM's general plugin: makes `--kv-transfer-config '{"kv_connector": "CacheBlendConnector", ...}'` enough."""

from __future__ import annotations

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
    KVConnectorFactory.register_connector(CONNECTOR_NAME, "cacheblend.vllm_backend.connector", CONNECTOR_NAME)
    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"cacheblend.vllm_backend.live_model:Noted{name}")
