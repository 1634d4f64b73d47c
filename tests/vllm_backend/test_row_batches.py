"""Rows of several prompts as one batch: slots, runs, and the pieces a batch is cut into."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.vllm_backend.rows import FEW_IDS, NO_SLOT, PromptPages, PromptRows, RowBatch, slices

CPU = torch.device("cpu")


@st.composite
def prompt_rows(draw, least: int = 1) -> PromptRows:
    """Some rows of a prompt in pages of its own, a few of them without a page."""
    block_size = draw(st.sampled_from([1, 3, 4]))
    blocks = draw(st.permutations(range(1, 9)))
    tokens = draw(st.integers(max(least, 1), len(blocks) * block_size))
    seed = draw(st.integers(0, 99))
    pages = PromptPages.of([seed * 1000 + position for position in range(tokens)], blocks, block_size)
    positions = sorted(draw(st.sets(st.integers(0, tokens - 1), min_size=least, max_size=tokens)))
    paged = None
    if draw(st.booleans()):
        paged = torch.tensor(
            draw(st.lists(st.booleans(), min_size=len(positions), max_size=len(positions))), dtype=torch.bool
        )
    return PromptRows(pages, torch.tensor(positions, dtype=torch.int64), paged)


PARTS = st.lists(prompt_rows(), min_size=1, max_size=4)


def positions_of(part: PromptRows) -> list[int]:
    return part.positions.tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(prompt_rows(least=0), max_size=4), st.integers(1, 12))
def test_slices_are_all_rows_in_order_and_every_piece_but_the_last_is_full(parts, most):
    pieces = slices(parts, most)
    assert [
        (index, position, slot)
        for piece in pieces
        for index, part in piece
        for position, slot in zip(positions_of(part), part.slots().tolist(), strict=True)
    ] == [
        (index, position, slot)
        for index, part in enumerate(parts)
        for position, slot in zip(positions_of(part), part.slots().tolist(), strict=True)
    ]
    sizes = [sum(len(part.positions) for _, part in piece) for piece in pieces]
    assert all(size == most for size in sizes[:-1])
    assert all(0 < size <= most for size in sizes[-1:])
    assert all(len(part.positions) for piece in pieces for _, part in piece)
    assert all(part.prompt is parts[index].prompt for piece in pieces for index, part in piece)


@settings(max_examples=100, deadline=None)
@given(st.lists(prompt_rows(least=0), max_size=4), st.integers(1, 12), st.data())
def test_rows_that_belong_together_stay_in_one_piece(parts, most, data):
    counts = [len(part.positions) for part in parts]
    edges = {i: sorted(data.draw(st.sets(st.integers(0, counts[i]), max_size=6))) for i in range(0, len(parts), 2)}
    together = {i: list(zip(own[::2], own[1::2], strict=False)) for i, own in edges.items()}
    pieces = slices(parts, most, together)
    assert [(i, p) for piece in pieces for i, part in piece for p in positions_of(part)] == [
        (i, p) for i, part in enumerate(parts) for p in positions_of(part)
    ]
    groups = [
        {(index, p) for p in positions_of(parts[index])[first:last]}
        for index, own in together.items()
        for first, last in own
    ]
    of_pieces = [{(i, p) for i, part in piece for p in positions_of(part)} for piece in pieces]
    assert all(sum(bool(group & rows) for rows in of_pieces) == 1 for group in groups)
    assert all(rows for rows in of_pieces)
    assert all(len(rows) <= most or rows in groups for rows in of_pieces), "a piece is larger for one such group alone"


def test_nothing_is_cut_into_no_pieces():
    assert slices([], 4) == []
    assert slices([PromptRows(PromptPages.of([1, 2], [1], 4), torch.empty(0, dtype=torch.int64))], 4) == []


@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_runs_cover_all_rows_and_are_as_long_as_they_can_be(parts):
    batch = RowBatch(parts, CPU)
    starts = batch.run_starts.tolist()
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    rows = list(zip(batch.prompt_index_cpu.tolist(), batch.positions_cpu.tolist(), strict=True))
    for index in range(1, len(rows)):
        (prompt, position), (prompt_before, before) = rows[index], rows[index - 1]
        assert (index in starts) == (prompt != prompt_before or position != before + 1)


def test_one_prompts_rows_that_continue_anothers_are_a_run_of_their_own():
    one = PromptRows(PromptPages.of(range(8), [1, 2], 4), torch.tensor([0, 1, 2, 5]))
    other = PromptRows(PromptPages.of(range(8), [3, 4], 4), torch.tensor([6, 7]))
    assert RowBatch([one, other], CPU).run_starts.tolist() == [0, 3, 4]


@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_a_batch_is_its_parts_one_after_another(parts):
    batch = RowBatch(parts, CPU)
    assert len(batch) == sum(len(part.positions) for part in parts)
    assert batch.positions.dtype is batch.slots.dtype is torch.int64
    assert batch.token_ids.dtype is torch.int64
    for index, (part, where) in enumerate(batch):
        assert part is parts[index]
        assert batch.positions[where].tolist() == positions_of(part)
        assert batch.slots[where].tolist() == part.slots().tolist()
        assert batch.token_ids[where].tolist() == [int(part.prompt.token_ids[p]) for p in positions_of(part)]
        assert set(batch.prompt_index_cpu[where].tolist()) == {index}
    assert where.stop == len(batch)
    assert batch.positions_cpu.tolist() == batch.positions.tolist()
    assert batch.prompt_index.tolist() == batch.prompt_index_cpu.tolist()


@settings(max_examples=100, deadline=None)
@given(prompt_rows())
def test_a_row_lies_in_its_own_block_at_its_own_offset_or_in_no_page(part):
    pages = part.prompt
    paged = [True] * len(part.positions) if part.paged is None else part.paged.tolist()
    for position, slot, has_page in zip(positions_of(part), part.slots().tolist(), paged, strict=True):
        if has_page:
            assert slot // pages.block_size == int(pages.block_ids[position // pages.block_size])
            assert slot % pages.block_size == position % pages.block_size
        else:
            assert slot == NO_SLOT


@settings(max_examples=50, deadline=None)
@given(prompt_rows(), st.data())
def test_a_cut_keeps_rows_with_their_slots(part, data):
    first = data.draw(st.integers(0, len(part.positions)))
    last = data.draw(st.integers(first, len(part.positions)))
    cut = part.cut(first, last)
    assert positions_of(cut) == positions_of(part)[first:last]
    assert cut.slots().tolist() == part.slots().tolist()[first:last]


def test_block_tables_are_padded_with_the_block_that_is_never_used():
    parts = [
        PromptRows(PromptPages.of(range(4), [7], 4), torch.tensor([0])),
        PromptRows(PromptPages.of(range(12), [3, 9, 4], 4), torch.tensor([1])),
    ]
    tables = RowBatch(parts, CPU).block_tables_cpu
    assert tables.dtype is torch.int32
    assert tables.tolist() == [[7, 0, 0], [3, 9, 4]]


@pytest.mark.parametrize("count", [0, 1, FEW_IDS, FEW_IDS + 1])
def test_ids_are_those_of_the_places_whether_few_or_many(count):
    pages = PromptPages.of(range(7, 7 + 2 * FEW_IDS), range(1, 129), 4)
    places = np.arange(count) * 2 % (2 * FEW_IDS)
    assert list(pages.ids_at(places)) == [7 + place for place in places.tolist()]


def test_pages_have_room_for_whole_blocks():
    assert PromptPages.of(range(5), [1, 2], 4).rows == 8
