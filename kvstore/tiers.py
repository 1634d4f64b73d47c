"""Where a chunk's KV is, and what the store says about it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import UnavailableReason
from kvstore.key import ChunkKey


class Tier(StrEnum):
    """A place that holds KV, fastest first."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk that can be served: `nbytes` of KV in this process's shard, `tokens` rows."""

    key: ChunkKey
    nbytes: int
    tokens: int
    tiers: frozenset[Tier]


@dataclass(frozen=True, slots=True)
class PutReport:
    """Where a chunk was kept.

    `reason` says why the disk refused it (`disk_full`, `unwritable`) or, when it is kept nowhere, why not
    (`host_budget`, `tp_layout`); None when it is on disk, or anywhere in a store without a disk.
    `remote_reason` says why the remote did not take it (`unreachable`, ...); None when it did or was not asked.
    """

    on_disk: bool
    on_host: bool
    reason: UnavailableReason | None
    on_remote: bool = False
    remote_reason: UnavailableReason | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load to the host: bytes moved, 0 if it was there already; wall seconds; where it came from."""

    nbytes: int
    seconds: float
    tier_from: Tier
