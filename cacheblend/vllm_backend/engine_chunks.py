"""Which chunks an engine has, as far as its client can know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.errors import UnavailableReason
from kvstore.events import Listener, NotStored
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.store import ChunkStore
from kvstore.tiers import Tier


class EngineChunks:
    """What lies in the engine's folder, and what the engine said of chunks when it collected them.

    Args:
        folder: a view of the folder that holds no bytes itself; of a store without a folder if the engine has none.
    """

    def __init__(self, folder: ChunkStore) -> None:
        self._folder = folder
        self._told: set[ChunkKey] = set()
        self._listeners: list[Listener] = []

    def lookup(self, identity: ChunkIdentity) -> Tier | None:
        """Where the engine has the chunk; None if nobody knows of it."""
        if self._folder.lookup(identity) is not None:
            return Tier.DISK
        return Tier.HOST if identity.key in self._told else None

    def refresh(self) -> None:
        """Look at the folder again.

        What the engine has in memory alone may leave it for what is loaded from disk, so it is not believed for ever;
        without a disk nothing is ever loaded, and nothing leaves.
        """
        if self._folder.disk is not None:
            self._folder.refresh()
            self._told.clear()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of chunks that the engine's disk did not take; returns the way to stop."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def take(self, identity: ChunkIdentity, account: dict[str, Any]) -> None:
        """Note what an engine said of a chunk that it collected.

        Args:
            identity: the chunk.
            account: of the request; see `cacheblend.vllm_backend.results.collect_result`.
        """
        if account.get("on_disk") or account.get("on_host"):
            self._told.add(identity.key)
        if self._folder.disk is not None and account.get("on_disk") is False:
            reason = UnavailableReason(account.get("reason") or UnavailableReason.UNWRITABLE)
            for listener in list(self._listeners):
                listener(NotStored(identity.key, reason))
