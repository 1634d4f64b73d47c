"""Copies that are asked of CUDA itself: what it is told, what its refusal leaves, and without it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore import copy_turns, cuda_runtime
from kvstore.copy_lane import CudaLane
from kvstore.layer_copies import LayerCopies


class Copy:
    """Stands for `cudaMemcpyAsync`: writes down what it is told, and answers."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.told: list[tuple[int, ...]] = []

    def __call__(self, *told: int) -> int:
        self.told.append(told)
        return self.answer


class Batch(Copy):
    """Stands for `cudaMemcpyBatchAsync`."""

    def __call__(self, *told: Any) -> int:
        to, origins, sizes, count, attributes, of_first, sets, stream = told
        # `cudaMemcpyAttributes` of CUDA 13: in the stream's order, no hint of where both ends lie, no flags.
        told_of_all = ctypes.string_at(ctypes.addressof(attributes._obj), ctypes.sizeof(attributes._obj))
        assert struct.unpack("<iiiiiI", told_of_all) == (1, 0, 0, 0, 0, 0)
        assert (list(of_first), sets.value) == ([0], 1)
        assert len(to) == len(origins) == len(sizes) == count.value
        self.told += [(*copy, stream.value) for copy in zip(to, origins, sizes, strict=True)]
        self.batches.append(count.value)
        return self.answer

    def __init__(self, answer: int) -> None:
        super().__init__(answer)
        self.batches: list[int] = []


class Runtime:
    """Stands for the runtime that torch has loaded."""

    def __init__(self) -> None:
        self.cudaMemcpyAsync = Copy(0)
        self.cudaMemcpyBatchAsync = Batch(0)
        self.cleared = 0

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 0


@pytest.fixture(params=["12.9"])
def runtime(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    found = Runtime()
    monkeypatch.setattr(torch.version, "cuda", request.param)
    monkeypatch.setattr(cuda_runtime, "_loaded_runtime", lambda *_: found)
    monkeypatch.setattr(cuda_runtime, "_get_last_error", lambda: found.cudaGetLastError)
    cuda_runtime.copies_to_device.cache_clear()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    yield found
    cuda_runtime.copies_to_device.cache_clear()


knows_batches = pytest.mark.parametrize("runtime", ["13.0"], indirect=True)


STREAM = SimpleNamespace(cuda_stream=5)


def test_copies_tell_where_from_where_to_how_much_and_on_which_stream(runtime):
    rings, chunks = [torch.zeros(4, 2, 3) for _ in range(2)], [torch.ones(9, 2, 3) for _ in range(2)]
    LayerCopies(rings, chunks, STREAM).start(1, 5, 3)
    host_to_device, layer = 1, 2 * 3 * 4
    assert runtime.cudaMemcpyAsync.told == [
        (ring[1].data_ptr(), chunk[5].data_ptr(), 3 * layer, host_to_device, 5)
        for ring, chunk in zip(rings, chunks, strict=True)
    ]
    assert runtime.cleared == 0


@knows_batches
def test_copies_of_a_turn_are_asked_for_at_once_where_cuda_knows_that(runtime, turns, monkeypatch):
    batch = runtime.cudaMemcpyBatchAsync
    monkeypatch.setattr(copy_turns, "leave_copy_queue", lambda _: turns.append(len(batch.told)))
    rings, chunks = [torch.zeros(4, 3) for _ in range(4)], [torch.ones(9, 3) for _ in range(4)]
    LayerCopies(rings, chunks, torch.cuda.Stream("cuda")).start(1, 5, 1)
    layer = 3 * 4
    assert batch.told == [
        (ring[1].data_ptr(), chunk[5].data_ptr(), layer, 5) for ring, chunk in zip(rings, chunks, strict=True)
    ]
    assert (batch.batches, turns) == ([2, 2], [2])
    assert not runtime.cudaMemcpyAsync.told


@knows_batches
def test_a_refused_batch_raises_and_leaves_no_error_for_torch_to_find(runtime):
    runtime.cudaMemcpyBatchAsync.answer = 1
    rings, chunks = [torch.zeros(1, 3) for _ in range(2)], [torch.ones(1, 3) for _ in range(2)]
    with pytest.raises(RuntimeError, match="refused to copy 24 bytes"):
        LayerCopies(rings, chunks, STREAM).start(0, 0, 1)
    assert runtime.cleared == 1


def test_a_refused_copy_raises_and_leaves_no_error_for_torch_to_find(runtime):
    runtime.cudaMemcpyAsync.answer = 1
    with pytest.raises(RuntimeError, match="refused to copy 12 bytes"):
        LayerCopies([torch.zeros(1, 3)], [torch.ones(1, 3)], STREAM).start(0, 0, 1)
    assert runtime.cleared == 1


def test_memory_that_is_not_page_locked_is_copied_by_torch_which_lets_other_threads_go_on(runtime, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: len(tensor) > 5)
    rings, chunks = [torch.zeros(4, 3) for _ in range(2)], [torch.rand(9, 3), torch.rand(5, 3)]
    LayerCopies(rings, chunks, None).start(1, 2, 3)
    assert runtime.cudaMemcpyAsync.told == []
    for ring, chunk in zip(rings, chunks, strict=True):
        assert torch.equal(ring[1:], chunk[2:5])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has a CUDA runtime to be found")
def test_without_a_runtime_torch_copies_and_that_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    cuda_runtime.copies_to_device.cache_clear()
    ring, chunk = torch.zeros(4, 3), torch.rand(9, 3)
    for _ in range(2):
        LayerCopies([ring], [chunk], None).start(1, 5, 3)
    assert torch.equal(ring[1:], chunk[5:8])
    assert not ring[0].any()
    assert caplog.text.count("copied by torch") == 1


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies had been asked for when others got their turn."""
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=5, device=device))
    monkeypatch.setattr(copy_turns, "TURN_BYTES", 24)
    return []


def test_others_get_their_turn_after_so_many_bytes_of_layers(runtime, turns, monkeypatch):
    told = runtime.cudaMemcpyAsync.told
    monkeypatch.setattr(copy_turns, "leave_copy_queue", lambda _: turns.append(len(told)))
    stream = torch.cuda.Stream("cuda")
    copies = LayerCopies([torch.zeros(4, 3) for _ in range(5)], [torch.ones(9, 3) for _ in range(5)], stream)
    copies.start(0, 0, 1)
    assert turns == [2, 4]
    copies.start(0, 1, 2)
    assert turns == [2, 4, 5, 6, 7, 8, 9]
    copies.start(0, 0, 3)
    assert turns[7:] == list(range(10, 20))
    assert [nbytes for *_, nbytes, _, _ in told[10:]] == [24, 12] * 5


def test_a_chunk_is_copied_in_turns_that_are_the_whole_of_it(runtime, turns, monkeypatch):
    told = runtime.cudaMemcpyAsync.told
    monkeypatch.setattr(copy_turns, "leave_copy_queue", lambda _: turns.append(len(told)))
    room, chunk = torch.zeros(2, 7), torch.ones(2, 7)
    CudaLane(torch.device("cuda")).copy(room, chunk)
    pieces = [(to - room.data_ptr(), origin - chunk.data_ptr(), nbytes) for to, origin, nbytes, _, _ in told]
    assert pieces == [(0, 0, 24), (24, 24, 24), (48, 48, 8)]
    assert turns == [1, 2]
