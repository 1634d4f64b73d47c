"""Groups of unequal length laid out one after another."""

from __future__ import annotations

import numpy as np


def places_within(lengths: np.ndarray) -> np.ndarray:
    """[sum of lengths] int64: each item's place within its own group, from 0, for groups of `lengths` ([n] int64)."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
