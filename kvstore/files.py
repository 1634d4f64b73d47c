"""Chunk files as names and sizes, nothing opened."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.key import ChunkKey, ShardLayout

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([0-9a-f]{64})\.(\d+)of(\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A finished file, unopened: `nbytes` on disk, `last_used` (written or read) in seconds since the epoch."""

    path: Path
    key: ChunkKey
    shard: ShardLayout
    nbytes: int
    last_used: float


def shard_file_name(key: ChunkKey, shard: ShardLayout) -> str:
    """The file name of one shard of a chunk."""
    return f"{key}.{shard.rank}of{shard.size}.safetensors"


def shard_files_in(folder: Path) -> Iterator[ShardFile]:
    """Every file in the folder with a shard's name, in the order of names; what cannot be looked at is logged."""
    for path in listing(folder):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[2]) >= int(match[3]):
            continue
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s cannot be looked at: %s", path, error)
            continue
        shard = ShardLayout(int(match[2]), int(match[3]))
        yield ShardFile(path, ChunkKey(match[1]), shard, status.st_size, status.st_mtime)


def listing(folder: Path) -> list[Path]:
    """What a folder holds, by name; empty when there is no such folder or, logged, it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        logger.warning("the folder %s cannot be listed: %s", folder, error)
        return []


def is_gone(path: Path) -> bool:
    """Whether there is no such file; False when that cannot be told (a permission, an I/O error)."""
    try:
        return not path.exists()
    except OSError:
        return False


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def remove_file(path: Path) -> int:
    """Remove a file: bytes freed; 0 if it was gone or, logged, cannot be removed."""
    nbytes = size_of(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
        return 0
    return nbytes
