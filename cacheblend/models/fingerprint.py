"""What identifies a model's KV: two models with one fingerprint may read one another's chunk files."""

from __future__ import annotations

import hashlib
import json
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvstore.key import FORMAT_VERSION

SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 1 << 20

_SHAPE_FIELDS = (
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "rope_parameters",
    "quantization_config",
)


def model_fingerprint(config: Any, kv_dtype: str, folder: Path | None) -> str:
    """Hash everything about a model that its KV depends on.

    The weights enter as file sizes, safetensors headers and `SAMPLES_PER_FILE` sampled mebibytes a file, so that
    a model of any size is identified in well under a second. A model without a folder (dummy or hand-made
    weights) gets a nonce at every call, so that no two share a chunk; its chunks must not reach a disk that
    outlives it.

    Args:
        config: a transformers configuration.
        kv_dtype: name of the KV's dtype, e.g. "float32".
        folder: the folder the weights were read from, or None.

    Returns:
        64 hexadecimal digits.
    """
    described = {name: getattr(config, name, None) for name in _SHAPE_FIELDS}
    described["kv_dtype"] = kv_dtype
    described["lora"] = None
    described["format_version"] = FORMAT_VERSION
    described["weights"] = _weights(folder) if folder is not None else f"nonce:{uuid.uuid4().hex}"
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _weights(folder: Path) -> list[tuple[str, str]]:
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    return [(p.name, _file_digest(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns)) for p in files]


@lru_cache(maxsize=256)
def _file_digest(path: str, size: int, mtime_ns: int) -> str:
    del mtime_ns  # part of the cache's key only: a copy of the file is the same model
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if path.endswith(".safetensors"):
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
        stride = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (SAMPLES_PER_FILE - 1))
        for index in range(SAMPLES_PER_FILE):
            file.seek(min(index * stride, max(0, size - SAMPLE_BYTES)))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
