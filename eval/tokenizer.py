"""The tokenizer of the model that is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend.models.loading import load_tokenizer
from eval.errors import EvalError


def require_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        EvalError: the folder has none.
        BlendError: its files are damaged.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise EvalError(f"The model folder {folder} holds no tokenizer; save one there with save_pretrained.")
    return tokenizer
