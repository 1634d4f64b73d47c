"""Policies of eviction for the memory tiers, one class a file, replaceable by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import StoreError
from kvstore.eviction.gdsf import GdsfPolicy
from kvstore.eviction.lru import LruPolicy
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.s3fifo import S3FifoPolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"gdsf": GdsfPolicy, "lru": LruPolicy, "s3fifo": S3FifoPolicy}
"""What `make_policy` makes, by name."""

__all__ = ["POLICIES", "EvictionPolicy", "GdsfPolicy", "LruPolicy", "S3FifoPolicy", "make_policy"]


def make_policy(name: str) -> EvictionPolicy:
    """Return a new, empty policy: "gdsf", "lru" or "s3fifo".

    Raises:
        StoreError: there is no policy of that name.
    """
    if name not in POLICIES:
        raise StoreError(f"there is no eviction policy {name!r}; choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]()
