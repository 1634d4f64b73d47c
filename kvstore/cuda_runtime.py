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

_HOST_TO_DEVICE = 1


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
def copy_to_device() -> Callable[[int, int, int, int], None] | None:
    """A copy of page-locked memory, which the host asks for in three microseconds.

    It keeps the interpreter's lock: getting that back may take many.

    Returns:
        A function of (destination address on the current device, source address, bytes, CUDA stream), which raises
        RuntimeError if CUDA refuses; None, which is said, where the runtime cannot be reached. What it copies must live
        until the stream has done it.
    """
    try:
        copy = _loaded_runtime(ctypes.PyDLL).cudaMemcpyAsync
    except (OSError, AttributeError) as error:
        logger.warning("chunks are copied by torch, which takes longer to ask: %s", error)
        return None
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    copy.restype = ctypes.c_int

    def ask(destination: int, source: int, nbytes: int, stream: int) -> None:
        error = copy(destination, source, nbytes, _HOST_TO_DEVICE, stream)
        if error:
            clear_last_error()
            raise RuntimeError(f"CUDA refused to copy {nbytes} bytes to the GPU: error {error}.")

    return ask


def _loaded_runtime(kind: type[ctypes.CDLL] = ctypes.CDLL) -> Any:
    """The one that torch uses: another copy of the runtime has a last error and streams of its own."""
    major = str(torch.version.cuda).partition(".")[0]
    return kind(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
