"""What every policy asks of its arguments."""

from __future__ import annotations

import math

from kvstore.errors import StoreError
from kvstore.key import ChunkKey


def check_chunk(key: ChunkKey, nbytes: int, cost_s: float) -> None:
    """Refuse a chunk without bytes and a cost that is no duration.

    Raises:
        StoreError: `nbytes` is not above 0, or `cost_s` is negative or not finite.
    """
    if nbytes <= 0:
        raise StoreError(f"the chunk {key[:12]} is entered with {nbytes} bytes; give what it takes in the tier.")
    if not (cost_s >= 0 and math.isfinite(cost_s)):
        raise StoreError(f"the chunk {key[:12]} is entered with a cost of {cost_s} s; give a finite number from 0.")


def check_confidence(key: ChunkKey, confidence: float) -> None:
    """Refuse what is no probability.

    Raises:
        StoreError: `confidence` is outside 0 to 1.
    """
    if not 0 <= confidence <= 1:
        raise StoreError(f"the chunk {key[:12]} is expected with confidence {confidence}; give a number from 0 to 1.")
