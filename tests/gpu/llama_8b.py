"""An engine of the shape of Llama-3-8B with dummy weights: speed does not depend on what the weights are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
ROW_BYTES = 4 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
"""Keys and values of one row in all layers."""


def make_engine(folder: Path, connector: bool = True, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    """A `vllm.LLM` in this process, with CUDA graphs, without prefix caching.

    vLLM hashes a prompt's blocks one by one on their way in, with or without prefix caching: large ones are fewer.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from cacheblend.vllm_backend.plugin import register

    register()
    transfer = KVTransferConfig(
        kv_connector="CacheBlendConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"host_budget_bytes": 24 << 30, **(settings or {})},
    )
    given: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": 16384,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "block_size": 64,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "seed": 0,
        **options,
    }
    return LLM(model=str(folder), kv_transfer_config=transfer if connector else None, **given)
