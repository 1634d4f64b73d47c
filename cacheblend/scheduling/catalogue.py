"""The scheduler's own picture of which chunks exist, where, and how large. Imports no torch."""

from __future__ import annotations

from kvstore.key import ChunkKey
from kvstore.tiers import ChunkRecord, Tier

Places = int
"""The tiers a chunk is in, as the sum of their `PLACE_OF`."""

PLACE_OF: dict[Tier, Places] = {tier: 1 << index for index, tier in enumerate(Tier)}
ON_GPU, ON_HOST, ON_DISK, ON_REMOTE = (PLACE_OF[tier] for tier in (Tier.GPU, Tier.HOST, Tier.DISK, Tier.REMOTE))
IN_MEMORY = ON_GPU | ON_HOST

Entry = tuple[int, int, Places]
"""Bytes of KV, rows, places. A bare tuple of integers: the garbage collector stops looking at those, and so a
collection does not take longer for every chunk that there is."""

UNKNOWN: Entry = (0, 0, 0)


class Catalogue(dict[ChunkKey, Entry]):
    """Entries by key, `UNKNOWN` for a chunk that is nowhere; every call touches one of them.

    A dict itself, because it is asked for each chunk of each decision. A chunk that is in no tier is not in the
    catalogue. Its size is what was said first.
    """

    def __missing__(self, key: ChunkKey) -> Entry:
        return UNKNOWN

    def enter(self, record: ChunkRecord) -> None:
        """Take over a chunk with all its tiers."""
        self[record.key] = (record.nbytes, record.tokens, sum(PLACE_OF[tier] for tier in record.tiers))

    def add(self, key: ChunkKey, place: Places, nbytes: int, tokens: int) -> Entry:
        """The chunk is in this place now: its new entry."""
        old_nbytes, old_tokens, places = self[key]
        entry = (old_nbytes, old_tokens, places | place) if places else (nbytes, tokens, place)
        self[key] = entry
        return entry

    def drop(self, key: ChunkKey, place: Places) -> None:
        """The chunk, which is known, is in this place no more."""
        nbytes, tokens, places = self[key]
        if places & ~place:
            self[key] = (nbytes, tokens, places & ~place)
        else:
            del self[key]

    def forget(self, key: ChunkKey) -> None:
        """The chunk is nowhere any more."""
        self.pop(key, None)
