"""What can go wrong in the store, in words that a request's account can repeat."""

from __future__ import annotations

from enum import StrEnum


class StoreError(ValueError):
    """Bad use of the store: one sentence that names the input and the remedy."""


class UnavailableReason(StrEnum):
    """Why a chunk's KV is not served, so that its rows are computed afresh."""

    MISSING = "missing"
    PREFIX_CHANGED = "prefix_changed"
    CHECKSUM = "checksum"
    TRUNCATED = "truncated"
    FORMAT_VERSION = "format_version"
    OTHER_MODEL = "other_model"
    TP_LAYOUT = "tp_layout"
    TOKENS_DIFFER = "tokens_differ"
    UNREADABLE = "unreadable"
    EVICTED = "evicted"
    HOST_BUDGET = "host_budget"
    GPU_BUDGET = "gpu_budget"
    DISK_FULL = "disk_full"
    UNWRITABLE = "unwritable"
    UNREACHABLE = "unreachable"
    CANCELLED = "cancelled"


class ChunkUnavailable(Exception):
    """One chunk cannot be served or kept; never fatal to the request that wanted it.

    Attributes:
        key: the chunk's key.
        reason: why, as reported in a request's `meta`.
        detail: one sentence for people.
        damaged: the file itself is wrong and belongs in quarantine (an unreadable disk is not that).
    """

    def __init__(self, key: str, reason: UnavailableReason, detail: str, damaged: bool = False):
        super().__init__(key, reason, detail, damaged)
        self.key = key
        self.reason = reason
        self.detail = detail
        self.damaged = damaged

    def __str__(self) -> str:
        return f"chunk {self.key[:12]} is unavailable ({self.reason.value}): {self.detail}"


class BudgetExceeded(Exception):
    """A memory tier has no room for these bytes; something must be evicted first.

    Attributes:
        soon: what was evicted already would be enough, once the work queued on it is over.
    """

    def __init__(self, detail: str, soon: bool = False):
        super().__init__(detail)
        self.soon = soon
