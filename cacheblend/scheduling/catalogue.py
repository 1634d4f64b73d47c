"""The scheduler's own picture of which chunks exist, where, and how large. Imports no torch."""

from __future__ import annotations

from kvstore.key import ChunkKey
from kvstore.tiers import ChunkRecord, Tier

Places = int
"""The tiers a chunk is in, as the sum of their `PLACE_OF`."""

PLACE_OF: dict[Tier, Places] = {tier: 1 << index for index, tier in enumerate(Tier)}
ON_GPU, ON_HOST, ON_DISK, ON_REMOTE = (PLACE_OF[tier] for tier in (Tier.GPU, Tier.HOST, Tier.DISK, Tier.REMOTE))
IN_MEMORY = ON_GPU | ON_HOST
FASTEST_OF: tuple[Tier, ...] = tuple(
    next((tier for tier, place in PLACE_OF.items() if places & place), Tier.REMOTE) for places in range(1 << len(Tier))
)
"""The fastest tier of a chunk in these places, by places; what is nowhere comes last."""

Entry = tuple[int, int, Places]
"""Bytes of KV, rows, places. A bare tuple of integers: the garbage collector stops looking at those, and so a
collection does not take longer for every chunk that there is."""

UNKNOWN: Entry = (0, 0, 0)


class Catalogue(dict[ChunkKey, Entry]):
    """Entries by key, `UNKNOWN` for a chunk that is nowhere; every call touches one of them.

    A dict itself, because it is asked for each chunk of each decision; of a class of its own, because the garbage
    collector lets go of a plain dict of bare tuples, so that `gc.freeze` passes it over, and takes it up as young at
    the next entry, to walk all of it: milliseconds for 100,000 chunks, again and again. A chunk that is in no tier is
    not in the catalogue. Its size is what was said first.
    """

    def __missing__(self, key: ChunkKey) -> Entry:
        return UNKNOWN

    def enter(self, record: ChunkRecord) -> None:
        """Take over a chunk with all its tiers."""
        self[record.key] = (record.nbytes, record.tokens, sum(PLACE_OF[tier] for tier in record.tiers))

    def add(self, key: ChunkKey, place: Places, nbytes: int, tokens: int) -> Entry:
        """The chunk is in this place now: its new entry."""
        old_nbytes, old_tokens, places = self.get(key, UNKNOWN)
        entry = (old_nbytes, old_tokens, places | place) if places else (nbytes, tokens, place)
        self[key] = entry
        return entry

    def drop(self, key: ChunkKey, place: Places) -> Entry:
        """The chunk is in this place no more: the entry that it had, without the place if it was not there."""
        entry = self.get(key, UNKNOWN)
        nbytes, tokens, places = entry
        if places == place:
            del self[key]
        elif places & place:
            self[key] = (nbytes, tokens, places - place)
        return entry

    def forget(self, key: ChunkKey) -> None:
        """The chunk is nowhere any more."""
        self.pop(key, None)
