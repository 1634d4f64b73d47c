"""The disk tier: a folder of chunk files that any number of processes may fill and read at once.

    <root>/<first 16 characters of the fingerprint>/<key>.<rank>of<size>.safetensors
    <root>/quarantine/<the same name>            damaged files, each with a `.reason` text beside it

Files appear whole or not at all (`kvstore.atomic`); a reader verifies everything it serves
(`kvstore.format`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvstore import upkeep
from kvstore.atomic import is_temp_name, sync_folder, write_atomically
from kvstore.chunk import ChunkKV
from kvstore.errors import ChunkUnavailable, StoreError, UnavailableReason
from kvstore.files import ShardFile, listing, remove_file, shard_file_name, shard_files_in, size_of
from kvstore.format import Allocate, ChunkHeader, read_chunk, read_header, write_chunk
from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout
from kvstore.upkeep import Problem, PruneReport

logger = logging.getLogger(__name__)

QUARANTINE = "quarantine"

# EFBIG: a file size limit is one more way for a disk to have no room for a file.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskTier:
    """Chunk files under one root. Thread-safe and process-safe: all state is in the folder.

    Opening creates the folder when it can and removes what killed writers left behind.

    Args:
        root: the folder.
        require_writable: refuse a folder that takes no files, instead of saying so at every `put`.

    Raises:
        StoreError: the root, or a part of its path, is a file; or it is not writable and has to be.
    """

    def __init__(self, root: Path, require_writable: bool = False):
        self.root = Path(root)
        self._create_root(require_writable)
        freed = upkeep.remove_leftovers(self.temp_files())
        if freed:
            logger.info("removed %d bytes that killed writers left behind in %s", freed, self.root)

    def put(self, chunk: ChunkKV) -> None:
        """Store a chunk's shard, replacing one that is there.

        Raises:
            ChunkUnavailable: `disk_full` or `unwritable`; nothing half-written is left behind.
        """
        identity = chunk.identity
        path = self.path_of(identity.key, identity.fingerprint, chunk.shard)
        try:
            _create_folder(path.parent)
            write_chunk(path, chunk)
        except OSError as error:
            reason = write_failure(error)
            raise ChunkUnavailable(identity.key, reason, f"{path.parent} does not take it: {error}") from error

    def read(self, identity: ChunkIdentity, shard: ShardLayout, allocate: Allocate | None = None) -> ChunkKV:
        """Read one shard of a complete chunk, verified, and count it as used.

        Args:
            identity: the chunk.
            shard: which shard of it.
            allocate: gives the memory that the bytes are read straight into (`kvstore.format.Allocate`).

        Raises:
            ChunkUnavailable: every reason of `read_chunk`; also `tp_layout` when the chunk is here in another
                size only, and `missing` when another rank has not published its shard.
            StoreError: `allocate` gave memory that does not fit.
            Exception: whatever `allocate` raises.
        """
        path = self.path_of(identity.key, identity.fingerprint, shard)
        try:
            self._check_complete(identity, shard)
        except OSError as error:
            detail = f"{path.parent} cannot be looked into: {error}"
            raise ChunkUnavailable(identity.key, UnavailableReason.UNREADABLE, detail) from error
        chunk = read_chunk(path, identity, shard, allocate)
        # Being read is what "recently used" means to prune; a read-only cache simply does not record it.
        with contextlib.suppress(OSError):
            os.utime(path)
        return chunk

    def delete(self, key: ChunkKey, fingerprint: str, shards: Iterable[ShardLayout]) -> int:
        """Remove these shards of a chunk; file bytes freed, 0 if none was there or can be removed."""
        return sum(remove_file(self.path_of(key, fingerprint, shard)) for shard in shards)

    def quarantine(self, path: Path, reason: UnavailableReason, detail: str) -> None:
        """Set a damaged file aside, with a text beside it that says why; a failure to is logged."""
        target = self.root / QUARANTINE / path.name
        try:
            _create_folder(target.parent)
            os.replace(path, target)
            write_atomically(target.with_suffix(".reason"), f"{reason.value}: {detail}\n".encode())
        except FileNotFoundError:
            logger.info("the damaged file %s was already gone", path)
        except OSError as error:
            logger.warning("the damaged file %s cannot be set aside: %s", path, error)
        else:
            logger.warning("quarantined a chunk file (%s): %s", reason.value, detail)

    def files(self) -> Iterator[ShardFile]:
        """Every finished file, from names alone; files being written and quarantined ones are left out."""
        for folder in self._chunk_folders():
            yield from shard_files_in(folder)

    def scan(self) -> Iterator[ChunkHeader]:
        """The header of every finished file, tensors not read; files without a right one are logged."""
        for file in self.files():
            try:
                yield self.header_of(file)
            except ChunkUnavailable as error:
                logger.warning("left out of the scan: %s", error)

    def header_of(self, file: ShardFile) -> ChunkHeader:
        """The header of one file.

        Raises:
            ChunkUnavailable: the reasons of `read_header`, and `tokens_differ` when the file holds another
                chunk or shard than its name says.
        """
        header = read_header(file.path)
        if (header.identity.key, header.shard) != (file.key, file.shard):
            detail = f"{file.path} holds another chunk than its name says"
            raise ChunkUnavailable(file.key, UnavailableReason.TOKENS_DIFFER, detail, damaged=True)
        return header

    def verify(self) -> list[Problem]:
        """Read and verify every finished file and look for leftovers of killed writers; changes nothing."""
        return upkeep.find_leftovers(self.temp_files()) + upkeep.find_damage(self.files())

    def prune(self, max_bytes: int | None = None, older_than: float | None = None) -> PruneReport:
        """Remove leftovers and quarantined files, then whole chunks, least recently used first.

        A chunk is used when it is written or read from disk; being served from the host does not count.

        Args:
            max_bytes: remove chunks until the files take at most this many bytes.
            older_than: also remove every chunk last used more than this many seconds ago.
        """
        freed = upkeep.remove_leftovers(self.temp_files()) + sum(map(remove_file, self.quarantined()))
        report = upkeep.remove_least_used(self.files(), max_bytes, older_than)
        return PruneReport(report.keys, report.nbytes + freed)

    def bytes_used(self) -> int:
        """File bytes of finished and quarantined files."""
        return sum(map(size_of, self.quarantined())) + sum(file.nbytes for file in self.files())

    def path_of(self, key: ChunkKey, fingerprint: str, shard: ShardLayout) -> Path:
        """Where a chunk's shard is, or would be."""
        return self._folder_of(fingerprint) / shard_file_name(key, shard)

    def quarantined(self) -> list[Path]:
        """The files in quarantine, reason texts included."""
        return [path for path in listing(self.root / QUARANTINE) if not is_temp_name(path.name)]

    def temp_files(self) -> list[Path]:
        """Files being written now and leftovers of killed writers."""
        folders = [self.root, self.root / QUARANTINE, *self._chunk_folders()]
        return [path for folder in folders for path in listing(folder) if is_temp_name(path.name)]

    def _check_complete(self, identity: ChunkIdentity, shard: ShardLayout) -> None:
        key, fingerprint = identity.key, identity.fingerprint
        absent = [rank for rank in shard.all_ranks() if not self.path_of(key, fingerprint, rank).exists()]
        if not absent:
            return
        sizes = {file.shard.size for file in self._shards_of(key, fingerprint)} - {shard.size}
        if sizes:
            detail = f"it is stored for tensor-parallel size {max(sizes)}, not {shard.size}"
            raise ChunkUnavailable(key, UnavailableReason.TP_LAYOUT, detail)
        detail = f"rank {absent[0].rank} of {shard.size} is not in {self.root}"
        raise ChunkUnavailable(key, UnavailableReason.MISSING, detail)

    def _shards_of(self, key: ChunkKey, fingerprint: str) -> list[ShardFile]:
        return [file for file in shard_files_in(self._folder_of(fingerprint)) if file.key == key]

    def _folder_of(self, fingerprint: str) -> Path:
        name = fingerprint[:16]
        if name == QUARANTINE:
            raise StoreError(f"The model fingerprint {fingerprint!r} names a folder of the cache; change it.")
        return self.root / name

    def _chunk_folders(self) -> list[Path]:
        return [path for path in listing(self.root) if path.name != QUARANTINE]

    def _create_root(self, require_writable: bool) -> None:
        try:
            _create_folder(self.root)
            if require_writable:
                probe = self.root / f".writable.{os.getpid()}"
                write_atomically(probe, b"")
                remove_file(probe)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"The cache folder {self.root} is, or lies below, a file; name a folder.") from error
        except OSError as error:
            if require_writable:
                raise StoreError(
                    f"The cache folder {self.root} cannot be written ({error.strerror}); name another folder."
                ) from error
            logger.warning("the cache folder %s cannot be created: %s", self.root, error)


def write_failure(error: OSError) -> UnavailableReason:
    """`disk_full` when there was no room for the file, else `unwritable`."""
    return UnavailableReason.DISK_FULL if error.errno in _FULL else UnavailableReason.UNWRITABLE


def _create_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
