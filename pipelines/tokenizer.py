"""The tokenizer that a model folder must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend.models.loading import load_tokenizer
from pipelines.errors import PipelineError


def require_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        PipelineError: the folder has none.
        BlendError: its files are damaged.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise PipelineError(f"The model folder {folder} holds no tokenizer; save one there with save_pretrained.")
    return tokenizer
