"""Which model an engine serves, and whether the connector can blend it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig
from vllm.config import VllmConfig

from cacheblend.errors import UnsupportedModelError
from cacheblend.models.fingerprint import model_fingerprint
from cacheblend.models.support import require_supported


def transformers_config(vllm_config: VllmConfig) -> Any:
    """The model's configuration as transformers reads it: vLLM rewrites its own copy."""
    model = vllm_config.model_config
    return _config(str(model.model), model.revision, bool(model.trust_remote_code))


@lru_cache(maxsize=8)
def _config(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def weights_folder(vllm_config: VllmConfig) -> Path | None:
    """The folder the weights come from; None for dummy weights, whose KV no other process may use."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return None
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(model.model), revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def fingerprint_of(vllm_config: VllmConfig) -> str:
    """What the model's chunk keys are derived from; the same as the reference runner's for the same folder."""
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return model_fingerprint(transformers_config(vllm_config), dtype, weights_folder(vllm_config))


def require_blendable(vllm_config: VllmConfig) -> None:
    """Refuse a model or an engine setting that no gate covers.

    Raises:
        UnsupportedModelError: one sentence that names it and the remedy.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    require_supported(transformers_config(vllm_config))
    if model.hf_overrides:
        raise UnsupportedModelError(
            "`--hf-overrides` is not supported: chunk keys and moved keys follow the model folder's own configuration; "
            "write the change into its config.json."
        )
    if model.quantization is not None:
        raise UnsupportedModelError(
            f"Weights quantised by '{model.quantization}' are not supported: no gate covers them; use bf16 or fp32."
        )
    if model.use_mla:
        raise UnsupportedModelError("MLA models are not supported: their cache holds no keys that can be moved.")
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise UnsupportedModelError(f"A KV cache in {cache.cache_dtype} is not supported; use `--kv-cache-dtype auto`.")
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedModelError("Pipeline parallelism is not supported; use tensor parallelism.")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedModelError(f"`{name}` above 1 is not supported; leave it at 1.")
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in ("ngram", "ngram_gpu"):
        raise UnsupportedModelError(
            f"Speculation by '{speculation.method}' is not supported: a draft model knows nothing of blended KV; "
            "use n-gram speculation."
        )
