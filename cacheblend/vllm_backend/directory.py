"""The scheduler half's picture of which chunks every worker can have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvstore.errors import UnavailableReason
from kvstore.events import Evicted, Published, StoreEvent
from kvstore.key import ChunkIdentity, ChunkKey, ShardLayout
from kvstore.store import ChunkStore
from kvstore.stored_chunks import StoredChunks
from kvstore.tiers import ChunkRecord, Tier

TOKENS_KEPT = 1 << 20
"""Tokens of the chunks asked for last whose keys are remembered, some 50 MB: hashing takes three times as long."""


class ChunkDirectory:
    """What the workers told of their stores, and what lies in the folder that other processes fill as well.

    A chunk is in a tier once every rank has told so, and leaves it with the first that tells.

    Args:
        root: the store's folder; None if chunks are in the workers' memory only.
        ranks: tensor-parallel size.
    """

    def __init__(self, root: Path | None, ranks: int) -> None:
        self._ranks = ranks
        self._identities = _Identities()
        self._told: dict[ChunkKey, dict[Tier, set[int]]] = {}
        self._folder: ChunkStore | None = None
        self._in_folder: StoredChunks | None = None
        if root is not None:
            self._folder = ChunkStore(root, 0, shard=ShardLayout(0, ranks))
            self._in_folder = StoredChunks(self._folder)

    @property
    def folder(self) -> ChunkStore | None:
        """The store's folder as this process sees it; it holds no bytes in memory."""
        return self._folder

    def records(self) -> list[ChunkRecord]:
        """Chunks that lie in the folder already."""
        return self._folder.records() if self._folder is not None else []

    def __contains__(self, key: ChunkKey) -> bool:
        return any(len(ranks) == self._ranks for ranks in self._told.get(key, {}).values())

    def follow(self, events: Iterable[tuple[int, StoreEvent]]) -> list[StoreEvent]:
        """Take note of each rank's events.

        Returns:
            Those that are true of all ranks now.
        """
        return [event for rank, event in events if self._now_true(rank, event)]

    def find(
        self, fingerprint: str, token_ids: Sequence[int], prefixes: Sequence[tuple[int, ...]]
    ) -> tuple[ChunkIdentity | None, UnavailableReason | None]:
        """The chunk of these ids behind the first prefix that has it, or None and why; see `ChunkStore.find`."""
        for prefix in prefixes:
            identity = self._identities.of(fingerprint, prefix, tuple(token_ids))
            if identity.key in self:
                return identity, None
            if self._in_folder is not None and self._in_folder.find(fingerprint, token_ids, [prefix])[0] is not None:
                return identity, None
        if self._in_folder is None:
            return None, UnavailableReason.MISSING
        return self._in_folder.find(fingerprint, token_ids, prefixes)

    def identity(self, fingerprint: str, prefix: tuple[int, ...], token_ids: tuple[int, ...]) -> ChunkIdentity:
        """The chunk of these ids, whether there is one or not: the object that `find` gives as well."""
        return self._identities.of(fingerprint, prefix, token_ids)

    def look_again(self) -> None:
        """See what other processes have put into the folder by now."""
        if self._folder is not None:
            self._folder.refresh()

    def lose(self, key: ChunkKey) -> None:
        """A worker could not have the chunk: look at the folder again, and believe nothing told before."""
        self._told.pop(key, None)
        if self._folder is not None:
            self._folder.recheck(key)

    def close(self) -> None:
        """Let the folder go."""
        if self._folder is not None:
            self._folder.close()

    def _now_true(self, rank: int, event: StoreEvent) -> bool:
        if isinstance(event, Published):
            ranks = self._told.setdefault(event.key, {}).setdefault(event.tier, set())
            known = len(ranks) == self._ranks
            ranks.add(rank)
            return len(ranks) == self._ranks and not known
        if isinstance(event, Evicted):
            tiers = self._told.get(event.key, {})
            ranks = tiers.get(event.tier, set())
            was_everywhere = len(ranks) == self._ranks
            ranks.discard(rank)
            if not ranks:
                tiers.pop(event.tier, None)
            if not tiers:
                self._told.pop(event.key, None)
            return was_everywhere
        return rank == 0


class _Identities:
    """Chunks asked for last. Token ids must be integers: others are taken for those that they equal."""

    def __init__(self) -> None:
        # By hashes, which take longest: every look at a table of ids would make them anew.
        self._known: OrderedDict[int, ChunkIdentity] = OrderedDict()
        self._tokens = 0

    def of(self, fingerprint: str, prefix: tuple[int, ...], token_ids: tuple[int, ...]) -> ChunkIdentity:
        asked = (fingerprint, prefix, token_ids)
        number = hash(asked)
        identity = self._known.get(number)
        if identity is not None:
            if (identity.fingerprint, identity.prefix_ids, identity.token_ids) == asked:
                self._known.move_to_end(number)
                return identity
            self._tokens -= len(self._known.pop(number).token_ids)
        identity = self._known[number] = ChunkIdentity(fingerprint, prefix, token_ids)
        self._tokens += len(token_ids)
        while self._tokens > TOKENS_KEPT:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest.token_ids)
        return identity
