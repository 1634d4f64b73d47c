"""A model's name resolved to a folder."""

import os
from pathlib import Path

from pipelines.models.bundled import PREFIX, Role, find_bundled
from pipelines.models.cache import cached_model
from pipelines.models.errors import ModelError
from pipelines.models.hub import hub_model


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a language model, for ``AutoModelForCausalLM.from_pretrained``.

    Args:
        name: a local folder, a hub id, or ``bundled:NAME``.

    Raises:
        ModelError: there is no such model, or it cannot be fetched; one sentence that says what to do.
    """
    return _resolve(os.fspath(name), "model", ("config.json",))


def resolve_embedder(name: str | os.PathLike[str]) -> Path:
    """Return the folder of an embedding model, for ``SentenceTransformer``.

    Args:
        name: a local folder, a hub id, or ``bundled:NAME``.

    Raises:
        ModelError: there is no such model, or it cannot be fetched; one sentence that says what to do.
    """
    return _resolve(os.fspath(name), "embedder", ("modules.json", "config.json"))


def _resolve(name: str, role: Role, marks: tuple[str, ...]) -> Path:
    """Resolve ``name``; a folder must hold at least one of the files ``marks``."""
    if name.startswith(PREFIX):
        return cached_model(find_bundled(name, role))
    path = Path(name).expanduser()
    if name.strip() and path.is_dir():
        folder = path
    elif path.exists() or _is_only_a_path(name):
        raise ModelError(f"--{role} {name!r} is not a folder; give a model folder, a hub id or {PREFIX}NAME.")
    else:
        folder = hub_model(name, f"--{role}")
    if not any((folder / mark).is_file() for mark in marks):
        raise ModelError(f"--{role} {name!r} holds no {' or '.join(marks)}; give a folder that save_pretrained wrote.")
    return folder


def _is_only_a_path(name: str) -> bool:
    """Whether ``name`` cannot be a hub id, which is ``model`` or ``owner/model``."""
    return not name.strip() or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
