"""What a run's results depend on: results of other settings are never mixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.fidelity.records import ResultLog

SETTINGS_FILE = "settings.json"
RECORDS_FILE = "records.jsonl"

_FIDELITY = ("arms", "bench", "gates", "priming", "reference_bench", "run", "vllm_bench")
CODE = (
    *("cacheblend", "kvstore", "retrieval", "pipelines", "inputs"),
    *(f"eval/fidelity/{name}.py" for name in _FIDELITY),
    *("eval/layout.py", "eval/retrieved.py", "eval/scoring.py", "eval/statistics.py"),
)
"""Folders and files whose sources a record depends on; those of the report are not among them."""
MAY_DIFFER = frozenset({"arms", "tiers", "questions", "left_out"})
"""What says how much is measured, not what comes out: a later call may ask for more or for less."""


def code_digest(repository: Path) -> str:
    """SHA-256 of the sources that results depend on: other commits that leave them alone give the same."""
    digest = hashlib.sha256()
    named = [repository / name for name in CODE]
    files = [*(path for path in named if path.is_file()), *(path for top in named for path in top.rglob("*.py"))]
    for path in sorted(files):
        digest.update(f"{path.relative_to(repository).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def open_results(folder: Path, settings: Mapping[str, Any], fresh: bool) -> ResultLog:
    """Open the results in `folder` to go on with them, or begin new ones.

    Args:
        folder: made if it is not there.
        settings: everything the results depend on, JSON-ready; those in `MAY_DIFFER` may be others than before.
        fresh: throw away what is there.

    Raises:
        EvalError: the folder cannot be used, or holds results of other settings.
    """
    path = folder / SETTINGS_FILE
    records = folder / RECORDS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if fresh:
            records.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        if records.exists() and records.stat().st_size:
            _require_same(path, settings)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return ResultLog(records)
    except OSError as error:
        raise EvalError(f"--out {folder} cannot be written ({error.strerror}); name a writable folder.") from error


def _require_same(path: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")).items())
    except (FileNotFoundError, ValueError, AttributeError):
        raise EvalError(
            f"{path.parent} holds results, but {path.name} does not say of which settings; "
            "choose another --out or throw them away with --fresh."
        ) from None
    changed = [name for name in settings if name not in MAY_DIFFER and before.get(name) != settings[name]]
    if changed:
        raise EvalError(
            f"{path.parent} holds results of other settings ({', '.join(changed)}); "
            "choose another --out or throw them away with --fresh."
        )
