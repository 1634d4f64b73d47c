"""`Ranking`: the order of its chunks after any changes, and what outdated entries cost."""

from __future__ import annotations

import random
import sys

import pytest

import kvstore.eviction.ranking
from kvstore.eviction.ranking import Ranked, Ranking
from kvstore.key import ChunkKey

KEYS = [ChunkKey(f"{number:05d}") for number in range(5_000)]
CHANGES = 20_000


class ByKey:
    """A ranking and its chunks, as a policy has them."""

    def __init__(self):
        self.chunks = {}
        self.ranking = Ranking(self.chunks)

    def set(self, key, nbytes, rank, turn=0):
        chunk = self.chunks.setdefault(key, Ranked(key, nbytes))
        if chunk.nbytes != nbytes:
            self.ranking.set_aside(chunk)
            chunk.nbytes = nbytes
        self.ranking.set(chunk, rank, turn)

    def set_aside(self, key):
        if key in self.chunks:
            self.ranking.set_aside(self.chunks[key])

    def remove(self, key):
        if key in self.chunks:
            self.ranking.remove(self.chunks.pop(key))

    def first(self):
        return self.ranking.first().key

    def lowest(self, nbytes):
        return self.ranking.lowest(nbytes)

    @property
    def nbytes(self):
        return self.ranking.nbytes


def entries(ranking) -> int:
    return len(ranking.ranking._heap) + len(ranking.ranking._swept)


def most_lines_of_a_call(calls) -> int:
    """Lines of the ranking's code that the longest call runs: its work, without a clock."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    def enter(frame, event, argument):
        return count if frame.f_code.co_filename == kvstore.eviction.ranking.__file__ else None

    most, before = 0, sys.gettrace()
    sys.settrace(enter)
    try:
        for call, *arguments in calls:
            lines = 0
            call(*arguments)
            most = max(most, lines)
    finally:
        sys.settrace(before)
    return most


def up_down_out(ranking, keys, seed=0):
    """Calls that set ranks higher, set them lower and take chunks out: all that leaves entries behind."""
    draw = random.Random(seed)
    for turn in range(CHANGES):
        key = draw.choice(keys)
        if draw.random() < 0.3:
            yield draw.choice([ranking.set_aside, ranking.remove]), key
        else:
            yield ranking.set, key, 10, float(draw.choice([draw.randrange(1_000), -turn])), turn


def test_the_order_is_that_of_the_ranks_after_any_changes():
    draw, ranking, model = random.Random(1), ByKey(), {}
    keys = KEYS[:60]
    for turn in range(CHANGES):
        key, rank, nbytes = draw.choice(keys), draw.randrange(20), draw.randrange(1, 9)
        if draw.random() < 0.3:
            draw.choice([ranking.set_aside, ranking.remove])(key)
            model.pop(key, None)
        elif draw.random() < 0.2 and key in model:
            # Out and in again where it was, as after a hold.
            ranking.set_aside(key)
            ranking.set(key, *model[key])
        else:
            model[key] = nbytes, rank, turn
            ranking.set(key, *model[key])
        assert ranking.nbytes == sum(size for size, _, _ in model.values())
        if turn % 7 == 0 and model:
            order = sorted(model, key=lambda each: model[each][1:])
            assert ranking.first() == order[0]
            some = draw.randrange(1, 1 + ranking.nbytes)
            found = ranking.lowest(some)
            assert found == order[: len(found)]
            sizes = [model[each][0] for each in found]
            assert sum(sizes) >= some > sum(sizes[:-1])
            assert ranking.lowest(ranking.nbytes + 1) == order


def test_a_chunk_set_again_at_a_rank_it_once_had_is_found_once():
    ranking = ByKey()
    for rank in (5, 3):
        ranking.set(KEYS[0], 10, rank)
    ranking.set_aside(KEYS[0])
    ranking.set(KEYS[1], 10, 4)
    assert ranking.first() == KEYS[1]
    ranking.set(KEYS[0], 10, 5)
    assert ranking.lowest(100) == [KEYS[1], KEYS[0]]


def test_an_empty_ranking_has_no_first_and_none_lowest():
    ranking = ByKey()
    ranking.set(KEYS[0], 10, 1.0)
    ranking.remove(KEYS[0])
    assert ranking.lowest(1) == []
    with pytest.raises(IndexError):
        ranking.first()


def test_outdated_entries_are_at_most_a_few_for_each_chunk_whoever_looks_meanwhile():
    for looks in (False, True):
        ranking, keys = ByKey(), KEYS[:200]
        for call, *arguments in up_down_out(ranking, keys):
            call(*arguments)
            if looks and ranking.nbytes:
                ranking.first()
            assert entries(ranking) <= 3 * len(keys) + 64


def test_ranks_that_rise_and_fall_between_looks_leave_no_more_entries_behind():
    """Each time to less than before, so that no look ever comes to what was left behind."""
    ranking, keys = ByKey(), KEYS[:10]
    for turn in range(2_000):
        for place, key in enumerate(keys):
            ranking.set(key, 10, 10_000 - turn, place)
        ranking.lowest(100)
        for place, key in enumerate(keys):
            ranking.set(key, 10, -turn, place)
        assert entries(ranking) <= 3 * len(keys) + 64


def test_chunks_that_are_gone_leave_few_entries_behind():
    ranking = ByKey()
    for turn, key in enumerate(KEYS):
        ranking.set(key, 10, turn)
    for key in KEYS[10:]:
        ranking.remove(key)
    assert entries(ranking) <= 2 * 10 + 64


def test_no_change_pays_for_all_that_came_before_it():
    """Each of them does a bounded piece of the sweep: none takes longer for five hundred times the chunks."""
    few, many = (most_lines_of_a_call(up_down_out(ranking := ByKey(), keys)) for keys in (KEYS[:10], KEYS))
    assert entries(ranking) > 0
    assert many <= few + 10
