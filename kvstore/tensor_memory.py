"""What a memory tier asks of the memory that its tensors live in."""

from __future__ import annotations

from typing import Protocol

import torch

from kvstore.pins import Event


class TensorMemory(Protocol):
    """Where a tier's tensors live. Thread-safe."""

    @property
    def largest_free(self) -> int | None:
        """Bytes of the largest tensor that it could give; None if only the budget limits it."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """A tensor of uint8, [nbytes], with a storage of its own; None if there is no room in one piece.

        Its memory is given to another tensor when nothing refers to its storage any more.
        """
        ...

    def adopt(self, kv: torch.Tensor) -> torch.Tensor | None:
        """The tensor itself, if it can stay where it is; None if it must be copied to live here."""
        ...

    def grow(self, nbytes: int) -> None:
        """See to it that tensors can take `nbytes` in all; what is larger already stays as it is.

        Raises:
            StoreError: there is not so much memory.
        """
        ...

    def fence(self) -> Event | None:
        """When the work queued until now will have read what it reads; None if nothing is ever queued."""
        ...
