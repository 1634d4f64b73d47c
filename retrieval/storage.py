"""An index on disk: a manifest and the two files it names.

    retrieval-index.json         the manifest, replaced atomically: it alone says what the index is
    passages-<sha256>.faiss      a FAISS index, as faiss.serialize_index gives it
    chunks-<sha256>.jsonl        a chunk a line, with the ids of its passages

Data files are named by their content and written before the manifest that names them, so a save that is
interrupted at any instant leaves the index as it was. Files that no manifest names are removed by the next
save.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError

FORMAT = "cacheblend-retrieval-index"
VERSION = 1
MANIFEST = "retrieval-index.json"
_LOCK = ".lock"
_PATTERNS = {"passages": "passages-{}.faiss", "chunks": "chunks-{}.jsonl"}


def write_index(
    folder: Path, description: Mapping[str, Any], passages: bytes, chunks: Iterable[Mapping[str, Any]]
) -> None:
    """Replace the index in ``folder``, which is created if need be.

    Args:
        folder: where the index is kept; nothing else of it is touched.
        description: what the manifest says beside format, version and files.
        passages: the serialised FAISS index.
        chunks: the lines of the chunk file; values that JSON does not know are written as strings.

    Raises:
        RetrievalError: the folder cannot be written; the index that was there still is.
    """
    lines = (json.dumps(chunk, default=str) + "\n" for chunk in chunks)
    contents = {"passages": passages, "chunks": "".join(lines).encode()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            files = {part: _write_part(folder, part, data) for part, data in contents.items()}
            manifest = {"format": FORMAT, "version": VERSION, **description, "files": files}
            _write_durably(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
            _remove_unnamed(folder, {file["name"] for file in files.values()})
    except OSError as error:
        raise RetrievalError(
            f"the index folder {folder} cannot be written ({error.strerror}); give a writable folder."
        ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the index in ``folder``.

    Raises:
        RetrievalError: there is no index, its manifest is damaged, or it is of another version.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise RetrievalError(
            f"{folder} holds no retrieval index ({error.strerror}); build one there or give its folder."
        ) from error
    except ValueError as error:
        raise damaged(folder, MANIFEST) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise damaged(folder, MANIFEST)
    if manifest.get("version") != VERSION:
        raise RetrievalError(
            f"the index in {folder} has format version {manifest.get('version')!r}, "
            f"this program reads {VERSION}; build it again."
        )
    return manifest


def read_parts(folder: Path, manifest: Mapping[str, Any]) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the serialised FAISS index and the lines of the chunk file, both checked against the manifest.

    Raises:
        RetrievalError: a file is missing or differs from what was saved.
    """
    passages = _read_part(folder, manifest, "passages")
    return passages, [json.loads(line) for line in _read_part(folder, manifest, "chunks").splitlines()]


def damaged(folder: Path, name: str) -> RetrievalError:
    """Return the error for a file of the index in ``folder`` that does not hold what it should."""
    return RetrievalError(f"the index in {folder} is damaged ({name}); build it again.")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from saving into ``folder`` meanwhile."""
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_part(folder: Path, part: str, data: bytes) -> dict[str, Any]:
    checksum = hashlib.sha256(data).hexdigest()
    name = _PATTERNS[part].format(checksum[:32])
    _write_durably(folder / name, data)
    return {"name": name, "bytes": len(data), "sha256": checksum}


def _write_durably(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it is there whole or, if it was there before, as it was."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    """Remove the data files of earlier and of interrupted saves."""
    for pattern in _PATTERNS.values():
        for file in folder.glob(pattern.format("*") + "*"):
            if file.name not in named:
                file.unlink(missing_ok=True)


def _read_part(folder: Path, manifest: Mapping[str, Any], part: str) -> bytes:
    try:
        entry = manifest["files"][part]
        name, checksum = str(entry["name"]), entry["sha256"]
    except (KeyError, TypeError) as error:
        raise damaged(folder, MANIFEST) from error
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise damaged(folder, name) from error
    if hashlib.sha256(data).hexdigest() != checksum:
        raise damaged(folder, name)
    return data
