"""Memory that cannot be page-locked is refused, and CUDA holds the refusal against nobody afterwards.

The CUDA runtime is a stand-in; `tests/gpu/check_prefetcher.py` asks the real one.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvstore.errors import StoreError
from kvstore.pinned import HostBuffer


class Runtime:
    """A CUDA runtime that locks nothing and remembers its last error until it is asked for it."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.last_error = 0

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:
        self.last_error = 2
        return self.last_error


class RuntimeThatTells(Runtime):
    def cudaGetLastError(self) -> int:
        told, self.last_error = self.last_error, 0
        return told


def test_a_failed_lock_leaves_no_error_behind(monkeypatch):
    runtime = RuntimeThatTells()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(StoreError, match="cannot be page-locked"):
        HostBuffer(4096, pinned=True)
    assert runtime.last_error == 0


def test_a_failed_lock_is_told_of_also_where_the_runtime_cannot_be_reached(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    with pytest.raises(StoreError, match="cannot be page-locked"):
        HostBuffer(4096, pinned=True)
    assert "cannot be cleared" in caplog.text
