"""What the index asks of an embedder."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Embedder(Protocol):
    """Turns texts into vectors of length 1 whose inner product says how near their meanings are."""

    @property
    def name(self) -> str:
        """What the model is called, for people."""
        ...

    @property
    def fingerprint(self) -> str:
        """What identifies the model by content: vectors of different fingerprints must not be compared."""
        ...

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    def embed_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one vector a text, float32 [texts, dimension]; a text's overlength is not read."""
        ...

    def embed_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return vectors that together cover all of each text.

        Returns:
            vectors: float32 [passages, dimension], one or more a text, in order of the texts.
            owner: int64 [passages], the place in ``texts`` of the text that each passage is from, ascending.
        """
        ...
