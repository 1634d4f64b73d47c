"""Host memory for chunks in one buffer, page-locked for a GPU."""

from __future__ import annotations

import logging
import mmap
import weakref

import numpy as np
import torch

from kvstore.cuda_runtime import clear_last_error
from kvstore.errors import StoreError

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context, not only the one that registers


class HostBuffer:
    """One private mapping of `nbytes` bytes.

    With `pinned` it is page-locked as a whole, at once. That takes some tenths of a second a GiB, which an engine
    pays while it starts. Slabs that are locked when first needed would stall the driver's calls, and so running
    decodes, at that moment, and waste what does not fit a slab's end; and `pin_memory()` rounds sizes up to
    powers of two.

    Raises:
        StoreError: there is not so much memory, or it cannot be page-locked.
    """

    def __init__(self, nbytes: int, pinned: bool = False):
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise StoreError(f"The host has no {nbytes} bytes for chunks ({error}); lower the host budget.") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        if pinned:
            self._pin()

    def block(self, offset: int, nbytes: int) -> tuple[object, torch.Tensor]:
        """See `kvstore.blocks.Buffer.block`."""
        owner = self._bytes[offset : offset + nbytes]
        return owner, torch.from_numpy(owner)

    def _pin(self) -> None:
        start, nbytes = self._bytes.ctypes.data, self._bytes.nbytes
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(start, nbytes, _PORTABLE)
        if error != runtime.cudaError.success:
            clear_last_error()
            raise StoreError(
                f"The host's {nbytes} bytes for chunks cannot be page-locked ({error}); "
                "lower the host budget or raise the limit of locked memory (ulimit -l)."
            )
        weakref.finalize(self, _unpin, start, self._bytes).atexit = False
        logger.info("page-locked %d bytes of host memory for chunks", nbytes)


def _unpin(start: int, mapped: np.ndarray) -> None:
    """`mapped` keeps the mapping alive until it is unregistered."""
    torch.cuda.cudart().cudaHostUnregister(start)
