"""Whether vLLM can be the engine for a model here. Imports vLLM only where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from transformers import AutoConfig


def is_installed() -> bool:
    """Whether vLLM is installed; it is not imported for that."""
    return importlib.util.find_spec("vllm") is not None


def why_unusable(folder: Path) -> str | None:
    """Why vLLM cannot serve the model in `folder` on this machine, although the reference runner might; None if it can.

    A model that neither of them serves is no matter of this: it is refused when it is loaded.
    """
    if not is_installed():
        return "it is not installed"
    import vllm
    from vllm.platforms import current_platform

    from cacheblend.errors import BlendError
    from cacheblend.vllm_backend.versions import require_version

    try:
        require_version(vllm.__version__)
    except BlendError as error:
        return str(error)
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return "this build of it finds no device here"
    return _why_no_attention(folder) if current_platform.is_cpu() else None


def _why_no_attention(folder: Path) -> str | None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from cacheblend.vllm_backend.engine_arguments import head_dim_of

    try:
        head_dim = head_dim_of(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    known = CPUAttentionBackend.get_supported_head_sizes()
    return None if head_dim in known else f"its CPU attention has no heads of {head_dim}"
