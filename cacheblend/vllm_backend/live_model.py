"""Where the connector's worker finds the model that vLLM loaded.

vLLM hands a connector its pages and its attention layers, but not the model they belong to. So the four supported
architectures are registered, through vLLM's own registry for models from outside, as subclasses that do nothing but
note that they were made.
"""

from __future__ import annotations

import weakref
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from cacheblend.errors import BlendError

_MADE: list[weakref.ref[Any]] = []


class _Noted:
    """Notes each instance; mixed in before vLLM's own class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        _MADE.append(weakref.ref(self))


class NotedLlamaForCausalLM(_Noted, LlamaForCausalLM):
    """vLLM's Llama."""


class NotedMistralForCausalLM(_Noted, MistralForCausalLM):
    """vLLM's Mistral."""


class NotedQwen2ForCausalLM(_Noted, Qwen2ForCausalLM):
    """vLLM's Qwen2."""


class NotedQwen3ForCausalLM(_Noted, Qwen3ForCausalLM):
    """vLLM's Qwen3."""


def model_of(vllm_config: VllmConfig) -> Any:
    """The model whose attention layers this configuration knows.

    Raises:
        BlendError: if there is none: the plugin was not loaded, or the architecture is another one.
    """
    known = {id(layer) for layer in vllm_config.compilation_config.static_forward_context.values()}
    for made in _MADE:
        model = made()
        if model is not None and any(id(module) in known for module in model.modules()):
            return model
    raise BlendError(
        "The connector did not see the model being made: install the package so that vLLM loads its plugin "
        "`cacheblend` (VLLM_PLUGINS, if set, must name it), and serve Llama, Mistral, Qwen2 or Qwen3."
    )
