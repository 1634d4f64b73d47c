"""Loads a transformers model folder for the reference runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cacheblend.errors import BlendError, UnsupportedModelError
from cacheblend.models.support import require_supported

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype named `name`.

    Raises:
        BlendError: if the reference runner does not compute in it.
    """
    if name not in DTYPES:
        raise BlendError(f"dtype '{name}' is not supported; use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def load_model(folder: Path, dtype: str, device: str) -> Any:
    """Load a model after its configuration has passed `require_supported`.

    Raises:
        UnsupportedModelError: for a model or RoPE variant that is not supported.
        BlendError: if the folder holds no loadable model or the device is not there.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BlendError(f"No model configuration could be read from {folder}: {_first_line(error)}") from error
    require_supported(config)
    _require_device(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch_dtype(dtype))
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise BlendError(f"The weights in {folder} could not be loaded: {_first_line(error)}") from error
    if not hasattr(model.get_decoder(), "rotary_emb"):
        raise UnsupportedModelError(f"The model in {folder} has no shared rotary embedding; it is not supported.")
    return model.to(device).eval()


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer's files."""
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def load_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, or None if it has none.

    Raises:
        BlendError: if its files are damaged.
    """
    if not has_tokenizer(folder):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        # The tokenizers library raises bare exceptions for files it cannot parse.
        raise BlendError(f"The tokenizer in {folder} could not be loaded: {_first_line(error)}") from error


def end_of_sequence_ids(model: Any) -> frozenset[int]:
    """The ids that end a generation, from the generation configuration or the model's."""
    return _end_ids(model.generation_config, model.config)


def end_of_sequence_ids_of_folder(folder: Path) -> frozenset[int]:
    """The same for the model in `folder`, which is not loaded.

    Raises:
        BlendError: if no configuration can be read there.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BlendError(f"No model configuration could be read from {folder}: {_first_line(error)}") from error
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation = None
    return _end_ids(generation, config)


def _end_ids(generation: Any | None, config: Any) -> frozenset[int]:
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _require_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BlendError(f"Device '{device}' cannot be used here: {_first_line(error)}; use cpu.") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
