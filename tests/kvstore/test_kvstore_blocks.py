"""Memory out of one buffer: a block is given to another tensor only when nothing looks into it any more."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from kvstore.arena import ALIGNMENT
from kvstore.blocks import ArenaMemory
from kvstore.errors import StoreError
from kvstore.pinned import HostBuffer


@pytest.fixture
def memory() -> ArenaMemory:
    memory = ArenaMemory(HostBuffer)
    memory.grow(2 * ALIGNMENT)
    return memory


def test_a_block_is_a_tensor_with_a_storage_of_its_own(memory):
    first, second = memory.allocate(8), memory.allocate(ALIGNMENT)
    assert (first.dtype, first.shape, first.untyped_storage().nbytes()) == (torch.uint8, (8,), 8)
    first.fill_(1)
    second.fill_(2)
    assert first.tolist() == [1] * 8
    assert memory.bytes_used == 2 * ALIGNMENT
    assert memory.allocate(1) is None


def test_a_block_is_free_when_its_tensor_is_gone(memory):
    tensors = [memory.allocate(1), memory.allocate(1)]
    assert memory.largest_free == 0
    tensors.clear()
    assert memory.bytes_used == 0
    assert memory.largest_free == 2 * ALIGNMENT


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_view_keeps_its_block_even_after_the_tensor_it_was_made_from_is_gone(memory, mode):
    with mode():
        tensor = memory.allocate(2 * ALIGNMENT)
        part = tensor.view(torch.float32).view(2, -1)[1].fill_(7)
    del tensor
    gc.collect()
    assert memory.allocate(1) is None
    assert part[0].item() == 7
    del part
    assert memory.allocate(1) is not None


def test_growing_adds_a_buffer_and_leaves_what_is_there(memory):
    first = memory.allocate(2 * ALIGNMENT).fill_(3)
    memory.grow(2 * ALIGNMENT)
    assert memory.nbytes == 2 * ALIGNMENT
    memory.grow(5 * ALIGNMENT)
    assert (memory.nbytes, memory.largest_free) == (5 * ALIGNMENT, 3 * ALIGNMENT)
    second = memory.allocate(3 * ALIGNMENT).fill_(4)
    assert (first.unique().tolist(), second.unique().tolist()) == ([3], [4])


def test_two_who_grow_at_once_make_the_memory_once():
    asked: list[int] = []
    both_wait = threading.Event()

    def make(nbytes: int) -> HostBuffer:
        asked.append(nbytes)
        both_wait.wait(0.2)
        return HostBuffer(nbytes)

    memory = ArenaMemory(make)
    growing = [threading.Thread(target=memory.grow, args=(4 * ALIGNMENT,)) for _ in range(2)]
    for thread in growing:
        thread.start()
    assert memory.allocate(1) is None, "nobody else waits for the buffer"
    both_wait.set()
    for thread in growing:
        thread.join()
    assert (asked, memory.nbytes) == ([4 * ALIGNMENT], 4 * ALIGNMENT)


def test_a_buffer_outlives_its_memory_for_as_long_as_a_tensor_looks_into_it(memory):
    tensor = memory.allocate(ALIGNMENT).fill_(5)
    del memory
    gc.collect()
    assert tensor.unique().tolist() == [5]


def test_more_memory_than_the_host_has_is_refused_in_one_sentence():
    with pytest.raises(StoreError, match="lower the host budget"):
        HostBuffer(1 << 62)


def test_threads_that_take_and_drop_blocks_never_share_one(memory):
    memory.grow(8 * ALIGNMENT)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            tensor = memory.allocate(ALIGNMENT)
            if tensor is not None:
                tensor.fill_(mark)
                if tensor.unique().tolist() != [mark]:
                    wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert memory.bytes_used == 0
