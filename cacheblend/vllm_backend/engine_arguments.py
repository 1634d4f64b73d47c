"""From a model folder to vLLM's own configuration, with the connector in it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import vllm
from transformers import AutoConfig
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from cacheblend.errors import BlendError
from cacheblend.models.loading import has_tokenizer, torch_dtype
from cacheblend.models.support import require_supported
from cacheblend.vllm_backend.model_identity import require_blendable
from cacheblend.vllm_backend.plugin import register
from cacheblend.vllm_backend.settings import CONNECTOR_NAME, ConnectorSettings
from cacheblend.vllm_backend.versions import require_version

CPU_KV_BYTES = 2 << 30
"""Room for the KV of running requests on a CPU, unless the caller or VLLM_CPU_KVCACHE_SPACE (GiB) says otherwise."""

REFUSALS = (ValueError, TypeError, VLLMValidationError)
"""What vLLM raises for input that it cannot use; not in every release is the last one a ValueError."""

CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CPU_ROW_GRANULE = 128
DEFAULT_MODEL_LEN = 8_192
DEFAULT_BATCHED_TOKENS = 8_192


def make_vllm_config(
    folder: Path, settings: ConnectorSettings, dtype: str, options: Mapping[str, Any] | None = None
) -> VllmConfig:
    """vLLM's configuration for the model in `folder`.

    Args:
        folder: a Hugging Face model folder.
        settings: of the connector.
        dtype: "float32" or "bfloat16", of weights and KV.
        options: vLLM's engine arguments by name; they win over the defaults given here.

    Raises:
        UnsupportedModelError: for a model or an option that no gate covers.
        BlendError: for a folder without a model, an unknown option, a value that vLLM refuses, or too little memory.
    """
    register()
    require_version(vllm.__version__)
    torch_dtype(dtype)
    options = dict(options or {})
    _require_known(options)
    arguments = {**_defaults(folder, dtype, options), **options}
    transfer = KVTransferConfig(
        kv_connector=CONNECTOR_NAME,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings.model_dump(mode="json", exclude_none=True),
    )
    try:
        args = EngineArgs(model=str(folder), dtype=dtype, kv_transfer_config=transfer, **arguments)
        config = args.create_engine_config(UsageContext.LLM_CLASS)
    except (*REFUSALS, RuntimeError, OSError) as error:
        raise BlendError(f"vLLM refuses the model in {folder}: {one_line(error)}.") from error
    require_blendable(config)
    return config


def one_line(error: BaseException) -> str:
    """What an error says, on one line and without the full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and "validation error" in lines[0]:
        # pydantic: the field, then what is wrong with it.
        lines = [f"{lines[1]}: {lines[2].partition(' [type=')[0].removeprefix('Value error, ')}"]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _defaults(folder: Path, dtype: str, options: Mapping[str, Any]) -> dict[str, Any]:
    config = _config(folder)
    defaults: dict[str, Any] = {
        # A folder's own sampling defaults must not change answers that are asked to be greedy.
        "generation_config": "vllm",
        "seed": 0,
        "use_tqdm_on_load": False,
        "max_num_batched_tokens": DEFAULT_BATCHED_TOKENS,
        "max_model_len": min(int(config.max_position_embeddings), DEFAULT_MODEL_LEN),
        "skip_tokenizer_init": not has_tokenizer(folder),
        "enforce_eager": current_platform.is_cpu(),
    }
    if current_platform.is_cpu():
        defaults.update(_cpu_memory(config, dtype, options, defaults["max_model_len"]))
    return defaults


def _cpu_memory(config: Any, dtype: str, options: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Room for running requests, and a context that fits it.

    Raises:
        BlendError: if there is not so much memory, or the context asked for does not fit it.
    """
    asked: dict[str, Any] = {}
    room = options.get("kv_cache_memory_bytes")
    if os.environ.get(CPU_KV_VARIABLE):
        room = int(os.environ[CPU_KV_VARIABLE]) << 30
    elif room is None:
        room = asked["kv_cache_memory_bytes"] = CPU_KV_BYTES
    free = psutil.virtual_memory().available
    if room > free:
        raise BlendError(
            f"The {room / (1 << 30):g} GiB for the KV of running requests are more than the {free / (1 << 30):.1f} GiB "
            f"of memory that are free; set {CPU_KV_VARIABLE} to fewer GiB."
        )
    if options.get("num_gpu_blocks_override") is not None:
        return {**asked, "max_model_len": longest}
    rows = room // kv_bytes_per_token(config, dtype) // CPU_ROW_GRANULE * CPU_ROW_GRANULE
    wanted = options.get("max_model_len")
    if wanted is not None and wanted > rows:
        raise BlendError(
            f"A context of {wanted} tokens does not fit the {room / (1 << 30):g} GiB for the KV of running requests, "
            f"which hold {rows}; set {CPU_KV_VARIABLE} to more GiB, or ask for a shorter max_model_len."
        )
    return {**asked, "max_model_len": min(longest, rows)}


def kv_bytes_per_token(config: Any, dtype: str) -> int:
    """Bytes of KV that one row takes in all layers.

    Args:
        config: the model's transformers configuration.
        dtype: of the KV.
    """
    return config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim_of(config) * torch_dtype(dtype).itemsize


def head_dim_of(config: Any) -> int:
    """Elements of one head's key."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BlendError(f"No model configuration could be read from {folder}: {one_line(error)}.") from error
    require_supported(config)
    return config


def _require_known(options: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    ours = {"model", "dtype", "kv_transfer_config", "disable_log_stats"}
    for name in options:
        if name not in known or name in ours:
            raise BlendError(f"'{name}' is no option of vLLM's engine that can be given here; see vLLM's EngineArgs.")
