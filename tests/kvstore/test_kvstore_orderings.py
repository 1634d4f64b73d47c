from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore import ChunkKey, LruOrdering

A, B, C = map(ChunkKey, "abc")


def ordering_of(*entries: tuple[ChunkKey, int]) -> LruOrdering:
    ordering = LruOrdering()
    for key, nbytes in entries:
        ordering.add(key, nbytes)
    return ordering


def test_the_least_recently_used_go_first_and_no_more_than_needed():
    ordering = ordering_of((A, 10), (B, 10), (C, 10))
    assert ordering.victims(11, keep=()) == [A, B]
    ordering.touch(A)
    assert ordering.victims(11, keep=()) == [B, C]
    ordering.add(B, 10)
    assert ordering.victims(11, keep=()) == [C, A]


def test_kept_chunks_are_passed_over():
    assert ordering_of((A, 10), (B, 10), (C, 10)).victims(11, keep={A}) == [B, C]


def test_nothing_is_evicted_in_vain_or_without_need():
    ordering = ordering_of((A, 10), (B, 10))
    assert ordering.victims(11, keep={A}) == []
    assert ordering.victims(0, keep=()) == []


def test_choosing_victims_removes_nothing():
    ordering = ordering_of((A, 10))
    assert ordering.victims(5, keep=()) == ordering.victims(5, keep=()) == [A]


def test_a_removed_chunk_is_no_victim_and_unknown_ones_do_no_harm():
    ordering = ordering_of((A, 10), (B, 10))
    ordering.remove(A)
    ordering.remove(A)
    ordering.touch(A)
    assert ordering.victims(10, keep=()) == [B]


@given(
    sizes=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9)),
    kept=st.sets(st.sampled_from("abcdefgh")),
    nbytes=st.integers(0, 40),
)
def test_victims_free_enough_or_there_are_none(sizes, kept, nbytes):
    ordering = ordering_of(*((ChunkKey(key), size) for key, size in sizes.items()))
    victims = ordering.victims(nbytes, kept)
    evictable = sum(size for key, size in sizes.items() if key not in kept)
    assert not kept & set(victims)
    assert bool(victims) == (0 < nbytes <= evictable)
    assert not victims or sum(sizes[key] for key in victims) >= nbytes > sum(sizes[key] for key in victims[:-1])
