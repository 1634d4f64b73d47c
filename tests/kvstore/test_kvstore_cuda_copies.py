"""Copies that are asked of CUDA itself: what it is told, what its refusal leaves, and what happens without it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

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

    def __init__(self) -> None:
        self.cudaMemcpyAsync = Copy(0)
        self.cleared = 0

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    found = Runtime()
    monkeypatch.setattr(cuda_runtime, "_loaded_runtime", lambda: found)
    monkeypatch.setattr(cuda_runtime, "_get_last_error", lambda: found.cudaGetLastError)
    cuda_runtime._memcpy_async.cache_clear()
    yield found
    cuda_runtime._memcpy_async.cache_clear()


STREAM = SimpleNamespace(cuda_stream=5)


def test_a_copy_tells_where_from_where_to_how_much_and_on_which_stream(runtime):
    destination, source = torch.zeros(2, 3), torch.ones(2, 3)
    cuda_runtime.copy_to_device(destination, source, STREAM)
    host_to_device = 1
    told = (destination.data_ptr(), source.data_ptr(), 24, host_to_device, 5)
    assert runtime.cudaMemcpyAsync.told == [told]
    assert runtime.cleared == 0


def test_a_refused_copy_raises_and_leaves_no_error_for_torch_to_find(runtime):
    runtime.cudaMemcpyAsync.answer = 1
    with pytest.raises(RuntimeError, match="refused to copy 12 bytes"):
        cuda_runtime.copy_to_device(torch.zeros(3), torch.ones(3), STREAM)
    assert runtime.cleared == 1


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has a CUDA runtime to be found")
def test_without_a_runtime_torch_copies_and_that_is_said_once(caplog):
    cuda_runtime._memcpy_async.cache_clear()
    destination, source = torch.zeros(2, 3), torch.rand(2, 3)
    for _ in range(2):
        cuda_runtime.copy_to_device(destination, source, None)
    assert torch.equal(destination, source)
    assert caplog.text.count("copied by torch") == 1
