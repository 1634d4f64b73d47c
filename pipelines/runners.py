"""The model runner that an engine's name stands for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cacheblend.protocols import ModelRunner
from cacheblend.reference.runner import ReferenceRunner
from kvstore.store import ChunkStore
from pipelines.errors import PipelineError

ENGINES = ("reference",)


def choose_engine(name: str) -> str:
    """The engine to use for `auto`, or the one named.

    Raises:
        PipelineError: for an engine that is not installed or not part of this version.
    """
    if name == "auto":
        return "reference"
    if name in ENGINES:
        return name
    installed = "is installed, but this version does not run it yet" if _has_vllm() else "is not installed"
    raise PipelineError(f"Engine '{name}' {installed}; use the engine `reference` or `auto`.")


def make_runner(engine: str, folder: Path, store: ChunkStore, dtype: str, device: str) -> ModelRunner:
    """Load the model in `folder` for `engine`, one that `choose_engine` returned.

    Raises:
        BlendError: if the folder holds no loadable, supported model.
    """
    assert engine in ENGINES
    return ReferenceRunner.from_folder(folder, store, dtype, device)


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None
