from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.arena import ALIGNMENT, Arena
from kvstore.errors import StoreError

SIZE = 40 * ALIGNMENT


def test_blocks_are_aligned_and_sizes_are_rounded_up():
    arena = Arena(3 * ALIGNMENT - 1)
    assert arena.nbytes == 3 * ALIGNMENT
    offsets = [arena.allocate(1), arena.allocate(ALIGNMENT), arena.allocate(ALIGNMENT - 1)]
    assert sorted(offsets) == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert arena.allocate(1) is None


def test_the_smallest_free_block_that_holds_it_is_taken():
    arena = Arena(10 * ALIGNMENT)
    blocks = [arena.allocate(size * ALIGNMENT) for size in (3, 1, 2, 1, 3)]
    arena.free(blocks[0])
    arena.free(blocks[2])
    assert arena.allocate(2 * ALIGNMENT) == blocks[2]


def test_fragmentation_shows_as_the_largest_free_block():
    arena = Arena(4 * ALIGNMENT)
    blocks = [arena.allocate(ALIGNMENT) for _ in range(4)]
    arena.free(blocks[0])
    arena.free(blocks[2])
    assert (arena.nbytes - arena.bytes_used, arena.largest_free) == (2 * ALIGNMENT, ALIGNMENT)
    assert arena.can_fit(ALIGNMENT)
    assert not arena.can_fit(ALIGNMENT + 1)
    assert arena.allocate(2 * ALIGNMENT) is None
    arena.free(blocks[1])
    assert arena.largest_free == 3 * ALIGNMENT


def test_a_block_is_freed_once():
    arena = Arena(SIZE)
    block = arena.allocate(1)
    assert arena.free(block) == ALIGNMENT
    for never_given in (block, 1, SIZE):
        with pytest.raises(StoreError, match="freed once"):
            arena.free(never_given)


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(StoreError):
        Arena(-1)
    with pytest.raises(StoreError):
        Arena(SIZE).allocate(0)
    assert Arena(0).allocate(1) is None


class ArenaMachine(RuleBasedStateMachine):
    """The arena beside a set of intervals."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(SIZE)
        self.blocks: dict[int, int] = {}

    def holes(self) -> list[int]:
        edges = [0, *(edge for start in sorted(self.blocks) for edge in (start, start + self.blocks[start])), SIZE]
        return [end - start for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]

    @rule(nbytes=st.integers(1, SIZE // 3))
    def allocate(self, nbytes):
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        fitting = [hole for hole in self.holes() if hole >= size]
        assert self.arena.can_fit(nbytes) == bool(fitting)
        offset = self.arena.allocate(nbytes)
        assert (offset is not None) == bool(fitting)
        if offset is not None:
            before = self.holes()
            self.blocks[offset] = size
            after = self.holes()
            assert sum(before) - sum(after) == size
            assert min(fitting) in before, "the best fit shrank"
            assert sorted(before) == sorted([*after, min(fitting)] if min(fitting) == size else before)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data):
        offset = data.draw(st.sampled_from(sorted(self.blocks)))
        assert self.arena.free(offset) == self.blocks.pop(offset)
        with pytest.raises(StoreError):
            self.arena.free(offset)

    @invariant()
    def blocks_never_overlap_nor_pass_the_end(self):
        for start, after in pairwise([*sorted(self.blocks), SIZE]):
            assert start % ALIGNMENT == 0
            assert start + self.blocks[start] <= after

    @invariant()
    def what_is_free_has_coalesced(self):
        assert self.arena.bytes_used == sum(self.blocks.values())
        assert self.arena.largest_free == max(self.holes(), default=0)

    def teardown(self):
        for offset in self.blocks:
            self.arena.free(offset)
        assert self.arena.largest_free == SIZE


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
