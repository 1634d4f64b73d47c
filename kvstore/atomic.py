"""Files that appear whole or not at all, whoever is killed and whenever.

A file is written under a temporary name in its own folder, flushed to the device, and renamed. The writer
holds a lock (flock) on the temporary file until the rename; the kernel drops it when the writer dies, so a
leftover is a temporary file that nobody has locked. The name carries the writer's process id for people; it
is not trusted, since ids are reused and mean nothing across containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

TEMP_SUFFIX = ".tmp"


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold exactly `data`, replacing what was there.

    Raises:
        OSError: nothing was changed and nothing is left behind.
    """
    temp, descriptor = _locked_temp(path)
    try:
        _write_all(descriptor, memoryview(data))
        os.fsync(descriptor)
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the device, so that a rename survives a power cut, where folders allow it."""
    # A folder may be writable but not readable, or its file system may not flush folders: the rename still holds.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_temp_name(name: str) -> bool:
    """Whether a file name is one of a file being written, or of one that never was finished."""
    return name.startswith(".") and name.endswith(TEMP_SUFFIX)


def is_stale(temp: Path) -> bool:
    """Whether a temporary file's writer is gone. False when that cannot be told."""
    return _with_dead_writer(temp, remove=False)


def remove_if_stale(temp: Path) -> bool:
    """Remove a temporary file whose writer is gone; True if it was removed."""
    return _with_dead_writer(temp, remove=True)


def _with_dead_writer(temp: Path, remove: bool) -> bool:
    try:
        descriptor = os.open(temp, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            temp.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _locked_temp(path: Path) -> tuple[Path, int]:
    while True:
        temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
        descriptor = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # A file system without locks leaves leftovers that are never taken for stale: no harm beyond space.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Between creation and lock a sweeper may have taken the file for a leftover and unlinked it.
        if os.fstat(descriptor).st_nlink:
            return temp, descriptor
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
