"""The engine that a name stands for, loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cacheblend.protocols import ModelRunner
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.vllm_backend.usability import is_installed, why_unusable
from kvstore.events import Listener
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore
from kvstore.tiers import Tier
from pipelines.config import PipelineConfig
from pipelines.errors import PipelineError

logger = logging.getLogger(__name__)

REFERENCE = "reference"
VLLM = "vllm"

_SETTINGS_OF_THEIR_OWN = frozenset({"folder", "model", "store_root", "host_budget_bytes", "dtype"})
_INSTEAD = "use the engine `reference` or `auto`."


class ChunkShelf(Protocol):
    """Says which chunks an engine has, and hears of those that its disk did not take."""

    def lookup(self, identity: ChunkIdentity) -> Tier | None:
        """The fastest tier that has the chunk, None if none has."""
        ...

    def refresh(self) -> None:
        """Look at the folder anew."""
        ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Send later events to `listener`; returns the way to stop."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model, ready to be run.

    Attributes:
        name: the engine.
        runner: runs the model.
        store: what the runner reads and writes, or a view of its folder if it keeps chunks in processes of its own.
        shelf: which chunks it has.
        chunks_per_call: chunks to collect in one call: enough for its batches, few enough to see progress.
    """

    name: str
    runner: ModelRunner
    store: ChunkStore
    shelf: ChunkShelf
    chunks_per_call: int


def require_installed(name: str) -> None:
    """Refuse, before anything is loaded, an engine that is not here.

    Raises:
        PipelineError: naming it.
    """
    if name == VLLM and not is_installed():
        raise PipelineError(f"Engine 'vllm' is not installed; {_INSTEAD}")


def choose_engine(name: str, folder: Path) -> str:
    """The engine for the model in `folder`: the one named, or for `auto` vLLM where it can serve it.

    Raises:
        PipelineError: if vLLM is named and cannot serve the model here.
    """
    require_installed(name)
    if name == REFERENCE:
        return name
    reason = why_unusable(folder)
    if reason is None:
        return VLLM
    if name == VLLM:
        raise PipelineError(f"Engine 'vllm' cannot serve this model here, because {reason}; {_INSTEAD}")
    logger.info("the engine is `reference`, not `vllm`: %s", reason)
    return REFERENCE


def load_engine(config: PipelineConfig, folder: Path) -> LoadedEngine:
    """Load the model in `folder` as `config` says.

    Raises:
        PipelineError: for an engine that cannot be used, or options for one that takes none.
        BlendError: if the folder holds no loadable, supported model, or the engine does not start.
        StoreError: if the cache folder cannot be used.
    """
    name = choose_engine(config.engine, folder)
    return _load_vllm(config, folder) if name == VLLM else _load_reference(config, folder)


def _load_reference(config: PipelineConfig, folder: Path) -> LoadedEngine:
    if config.engine_options and config.engine == REFERENCE:
        raise PipelineError("The engine `reference` takes no engine_options; leave them out.")
    store = ChunkStore(config.cache_dir, config.host_budget_bytes)
    runner = ReferenceRunner.from_folder(folder, store, config.dtype, config.device)
    return LoadedEngine(REFERENCE, runner, store, store, chunks_per_call=4)


def _load_vllm(config: PipelineConfig, folder: Path) -> LoadedEngine:
    # Imported here because it imports vLLM, which takes seconds and need not be installed.
    from cacheblend.vllm_backend.runner import VllmRunner

    if taken := _SETTINGS_OF_THEIR_OWN.intersection(config.engine_options):
        raise PipelineError(f"engine_options name '{min(taken)}', which is a setting of its own; give it there.")
    runner = VllmRunner.from_folder(
        folder, config.cache_dir, config.host_budget_bytes, config.dtype, **config.engine_options
    )
    return LoadedEngine(VLLM, runner, runner.store, runner.chunks, chunks_per_call=16)
