"""Chunk KV: keys, tensors, the file format, tiers, eviction policies and transfers. Knows nothing of models.

Importing this package imports no torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvstore.errors import BudgetExceeded, ChunkUnavailable, StoreError, UnavailableReason
from kvstore.events import Evicted, NotStored, Published, Quarantined, StoreEvent
from kvstore.eviction import EvictionPolicy, GdsfPolicy, LruPolicy, S3FifoPolicy, make_policy
from kvstore.key import FORMAT_VERSION, ChunkIdentity, ChunkKey, ShardLayout
from kvstore.pins import PinHandle
from kvstore.single_flight import Claim, SingleFlight
from kvstore.tiers import ChunkRecord, LoadReport, PutReport, Tier
from kvstore.transfer import AsyncPrefetcher, ThreadPrefetcher, TransferResult

if TYPE_CHECKING:
    from kvstore.chunk import ChunkKV
    from kvstore.disk import DiskTier
    from kvstore.format import ChunkHeader, read_chunk, read_header, write_chunk
    from kvstore.gpu import GpuPool
    from kvstore.host import HostTier
    from kvstore.memory import MemoryTier
    from kvstore.store import ChunkStore
    from kvstore.upkeep import Problem, PruneReport

_NEEDS_TORCH = {
    "ChunkHeader": "kvstore.format",
    "ChunkKV": "kvstore.chunk",
    "ChunkStore": "kvstore.store",
    "DiskTier": "kvstore.disk",
    "GpuPool": "kvstore.gpu",
    "HostTier": "kvstore.host",
    "MemoryTier": "kvstore.memory",
    "Problem": "kvstore.upkeep",
    "PruneReport": "kvstore.upkeep",
    "read_chunk": "kvstore.format",
    "read_header": "kvstore.format",
    "write_chunk": "kvstore.format",
}

__all__ = [
    "FORMAT_VERSION",
    "AsyncPrefetcher",
    "BudgetExceeded",
    "ChunkHeader",
    "ChunkIdentity",
    "ChunkKV",
    "ChunkKey",
    "ChunkRecord",
    "ChunkStore",
    "ChunkUnavailable",
    "Claim",
    "DiskTier",
    "Evicted",
    "EvictionPolicy",
    "GdsfPolicy",
    "GpuPool",
    "HostTier",
    "LoadReport",
    "LruPolicy",
    "MemoryTier",
    "NotStored",
    "PinHandle",
    "Problem",
    "PruneReport",
    "Published",
    "PutReport",
    "Quarantined",
    "S3FifoPolicy",
    "ShardLayout",
    "SingleFlight",
    "StoreError",
    "StoreEvent",
    "ThreadPrefetcher",
    "Tier",
    "TransferResult",
    "UnavailableReason",
    "make_policy",
    "read_chunk",
    "read_header",
    "write_chunk",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEEDS_TORCH[name]), name)
