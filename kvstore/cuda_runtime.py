"""What torch does not offer of the CUDA runtime that it has loaded."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

HOST_TO_DEVICE = 1
"""What kind of copy `memcpy_async` is asked for."""


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
    return _loaded_runtime().cudaGetLastError


@cache
def memcpy_async() -> Callable[..., int] | None:
    """CUDA's `cudaMemcpyAsync(to, from, bytes, kind, stream)`; None, which is said, where the runtime is out of reach.

    It keeps the interpreter's lock: asking takes three microseconds, and getting the lock back may take many.
    """
    try:
        ask = _loaded_runtime(ctypes.PyDLL).cudaMemcpyAsync
    except (OSError, AttributeError) as error:
        logger.warning("chunks are copied by torch, which takes longer to ask: %s", error)
        return None
    ask.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    ask.restype = ctypes.c_int
    return ask


def _loaded_runtime(kind: type[ctypes.CDLL] = ctypes.CDLL) -> Any:
    """The one that torch uses: another copy of the runtime has a last error and streams of its own."""
    major = str(torch.version.cuda).partition(".")[0]
    return kind(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
