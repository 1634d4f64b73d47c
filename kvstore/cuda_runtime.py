"""What torch does not offer of the CUDA runtime that it has loaded."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def clear_last_error() -> None:
    """Have CUDA forget the calling thread's last error, which torch would raise at its next kernel launch.

    For an error that was reported already. Does nothing, but says so, where the runtime cannot be reached.
    """
    try:
        _get_last_error()()
    except (OSError, AttributeError) as error:
        logger.warning("CUDA's last error cannot be cleared: %s", error)


def _get_last_error() -> Callable[[], object]:
    binding = getattr(torch.cuda.cudart(), "cudaGetLastError", None)
    if binding is not None:
        return binding
    # The one that torch uses: another copy of the runtime has a last error of its own.
    major = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW).cudaGetLastError
