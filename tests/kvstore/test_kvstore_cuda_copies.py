"""Copies that are asked of CUDA itself: what it is told, what its refusal leaves, and what happens without it."""

from __future__ import annotations

import pytest
import torch

from kvstore import cuda_runtime


class Copy:
    """Stands for `cudaMemcpyAsync`: writes down what it is told, and answers."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.told: list[tuple[int, ...]] = []

    def __call__(self, *told: int) -> int:
        self.told.append(told)
        return self.answer


class Runtime:
    """Stands for the runtime that torch has loaded."""

    def __init__(self, answer: int = 0) -> None:
        self.cudaMemcpyAsync = Copy(answer)
        self.cleared = 0

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 0


def copy_with(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(cuda_runtime, "_loaded_runtime", lambda: runtime)
    monkeypatch.setattr(cuda_runtime, "_get_last_error", lambda: runtime.cudaGetLastError)
    return cuda_runtime.copy_to_device.__wrapped__()


def test_a_copy_tells_where_from_where_to_how_much_and_on_which_stream(monkeypatch):
    runtime = Runtime()
    copy = copy_with(runtime, monkeypatch)
    copy(1 << 40, 77, 12, 5)
    host_to_device = 1
    assert runtime.cudaMemcpyAsync.told == [(1 << 40, 77, 12, host_to_device, 5)]
    assert runtime.cleared == 0


def test_a_refused_copy_raises_and_leaves_no_error_for_torch_to_find(monkeypatch):
    runtime = Runtime(answer=1)
    copy = copy_with(runtime, monkeypatch)
    with pytest.raises(RuntimeError, match="refused to copy 12 bytes"):
        copy(1, 2, 12, 0)
    assert runtime.cleared == 1


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has a CUDA runtime to be found")
def test_without_a_runtime_there_is_no_such_copy_and_it_is_said(caplog):
    assert cuda_runtime.copy_to_device.__wrapped__() is None
    assert "copied by torch" in caplog.text
