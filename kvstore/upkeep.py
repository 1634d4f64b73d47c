"""Looking after chunk files: finding what is wrong with them, and making room."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstore.atomic import is_stale, remove_if_stale
from kvstore.errors import ChunkUnavailable, UnavailableReason
from kvstore.files import ShardFile, remove_file, size_of
from kvstore.format import read_chunk, read_header
from kvstore.key import ChunkKey


@dataclass(frozen=True, slots=True)
class Problem:
    """One file that this process would not serve.

    Attributes:
        path: the file.
        reason: why it is not served.
        detail: one sentence for people.
        removable: a killed writer left it behind; `prune` removes it, and so does opening a tier.
        damaged: its content is wrong, so it belongs in quarantine, where a process that meets it puts it.

    What is neither is left alone: a sound file of another format version, or one that cannot be read now (a
    permission, an I/O error) and may be sound.
    """

    path: Path
    reason: UnavailableReason
    detail: str
    removable: bool = False
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Chunks removed, least recently used first, and the file bytes freed in all, leftovers included."""

    keys: tuple[ChunkKey, ...]
    nbytes: int


def find_leftovers(temps: Iterable[Path]) -> list[Problem]:
    """The temporary files whose writer is gone."""
    reason, detail = UnavailableReason.TRUNCATED, "left behind by a writer that was killed"
    return [Problem(temp, reason, detail, removable=True) for temp in temps if is_stale(temp)]


def find_damage(files: Iterable[ShardFile]) -> list[Problem]:
    """The files that would not be served; reads and verifies every byte."""
    checked = (_check(file) for file in files)
    return [problem for problem in checked if problem is not None]


def remove_leftovers(temps: Iterable[Path]) -> int:
    """Remove the temporary files whose writer is gone: bytes freed."""
    sizes = [(temp, size_of(temp)) for temp in temps]
    return sum(nbytes for temp, nbytes in sizes if remove_if_stale(temp))


def remove_least_used(files: Iterable[ShardFile], max_bytes: int | None, older_than: float | None) -> PruneReport:
    """Remove whole chunks, all their shards, least recently used first.

    A chunk is used when it is written or read from disk; being served from the host does not count.

    Args:
        files: every file of the tier.
        max_bytes: remove chunks until the files take at most this many bytes.
        older_than: also remove every chunk last used more than this many seconds ago.
    """
    chunks: dict[ChunkKey, list[ShardFile]] = defaultdict(list)
    for file in files:
        chunks[file.key].append(file)
    left = total = sum(file.nbytes for shards in chunks.values() for file in shards)
    now = time.time()
    removed: list[ChunkKey] = []
    for key, shards in sorted(chunks.items(), key=lambda item: _last_used(item[1])):
        too_many = max_bytes is not None and left > max_bytes
        too_old = older_than is not None and now - _last_used(shards) > older_than
        freed = sum(remove_file(shard.path) for shard in shards) if too_many or too_old else 0
        if freed:
            left -= freed
            removed.append(key)
    return PruneReport(tuple(removed), total - left)


def _check(file: ShardFile) -> Problem | None:
    try:
        header = read_header(file.path)
        read_chunk(file.path, header.identity, header.shard)
    except ChunkUnavailable as error:
        # Another process may have evicted the file since it was listed.
        if error.reason is UnavailableReason.MISSING:
            return None
        return Problem(file.path, error.reason, error.detail, damaged=error.damaged)
    if header.identity.key != file.key:
        detail = "it holds another chunk than its name says"
        return Problem(file.path, UnavailableReason.TOKENS_DIFFER, detail, damaged=True)
    if header.shard != file.shard:
        detail = "it holds another shard than its name says"
        return Problem(file.path, UnavailableReason.TP_LAYOUT, detail, damaged=True)
    return None


def _last_used(shards: list[ShardFile]) -> float:
    return max(shard.last_used for shard in shards)
