"""What torch does not offer of the CUDA runtime that it has loaded."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

BATCHES_FROM = 13
"""The first major version of CUDA whose batches of copies are asked for as here."""
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


class CopyToDevice(Protocol):
    """Copies page-locked memory to the current device, and keeps the interpreter's lock, which is slow to come back."""

    def __call__(self, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Ask for some copies, each as long as its size in bytes says.

        Args:
            destinations, sources: addresses. What is copied must live until the stream has done it.
            sizes: in bytes.
            stream: CUDA's own handle.

        Raises:
            RuntimeError: CUDA refuses.
        """
        ...


@cache
def copies_to_device() -> CopyToDevice | None:
    """How to ask CUDA itself for copies; None, which is said, where the runtime cannot be reached.

    Several at once where the runtime knows that (`BATCHES_FROM`): between copies that are asked for one by one the link
    of an H200 stands still for 2 us.
    """
    try:
        runtime = _loaded_runtime(ctypes.PyDLL)
        single = runtime.cudaMemcpyAsync
    except (OSError, AttributeError) as error:
        logger.warning("chunks are copied by torch, which takes longer to ask: %s", error)
        return None
    single.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    single.restype = ctypes.c_int
    batch = getattr(runtime, "cudaMemcpyBatchAsync", None) if _runtime_version() >= BATCHES_FROM else None

    def ask(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        if batch is not None and len(sizes) > 1:
            _require_taken(_ask_at_once(batch, destinations, sources, sizes, stream), sizes)
            return
        for destination, source, nbytes in zip(destinations, sources, sizes, strict=True):
            _require_taken(single(destination, source, nbytes, _HOST_TO_DEVICE, stream), [nbytes])

    return ask


class _CopyAttributes(ctypes.Structure):
    """`cudaMemcpyAttributes`: sources are read in the stream's order; hints where both ends lie are left out."""

    _fields_ = (("source_order", ctypes.c_int), ("locations", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_IN_STREAM_ORDER = _CopyAttributes(source_order=1)


def _ask_at_once(
    batch: Callable[..., int], destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
) -> int:
    count = len(sizes)
    pointers, lengths = ctypes.c_void_p * count, ctypes.c_size_t * count
    # The attributes hold for all copies from the first on.
    of_all = (ctypes.byref(_IN_STREAM_ORDER), (ctypes.c_size_t * 1)(0), ctypes.c_size_t(1))
    told = (pointers(*destinations), pointers(*sources), lengths(*sizes), ctypes.c_size_t(count), *of_all)
    return batch(*told, ctypes.c_void_p(stream))


def _require_taken(error: int, sizes: Sequence[int]) -> None:
    if error:
        clear_last_error()
        raise RuntimeError(f"CUDA refused to copy {sum(sizes)} bytes to the GPU: error {error}.")


def _runtime_version() -> int:
    """Major version of the CUDA that torch was built with; 0 without."""
    return int(str(torch.version.cuda or 0).partition(".")[0])


def _loaded_runtime(kind: type[ctypes.CDLL] = ctypes.CDLL) -> Any:
    """The one that torch uses: another copy of the runtime has a last error and streams of its own."""
    return kind(f"libcudart.so.{_runtime_version()}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
