"""G4: with the exact KV in the cache, recomputing any rows changes nothing.

A mask that lets a recomputed row see a later key, or hides an earlier one, fails here by orders of magnitude.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.reference import attention
from cacheblend.selectors.given import GivenRowsSelector
from kvstore.key import ChunkIdentity

TOLERANCE = 1e-4
LENGTHS = (130, 41, 170)


def exact_chunks(bench):
    """Chunks each encoded behind everything that comes before it: their KV is full prefill's."""
    before: tuple[int, ...] = ()
    chunks = []
    for length in LENGTHS:
        ids = bench.ids(length, length)
        chunks.append(bench.collect(ids, before))
        before += ids
    return chunks


@pytest.mark.parametrize("carry_drift", [False, True])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_g4_recomputing_any_rows_of_exact_kv_changes_nothing(bench, max_error, carry_drift, data):
    rows = data.draw(
        st.one_of(
            st.frozensets(st.integers(0, sum(LENGTHS) - 1), max_size=200),
            st.tuples(st.integers(0, 340), st.integers(1, 300)).map(lambda r: frozenset(range(r[0], sum(r)))),
        )
    )
    plan = bench.plan(exact_chunks(bench), bench.ids(9, 2), GivenRowsSelector.everywhere(sorted(rows)))
    plan = replace(plan, carry_drift=carry_drift)
    assert max_error(bench.logits(plan), bench.full(plan.token_ids)) <= TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_g4_an_off_by_one_mask_is_caught(llama, max_error, monkeypatch, shift):
    exact = attention.row_blocks

    def shifted(positions):
        return exact((positions + shift).clamp(0))

    chunks = exact_chunks(llama)
    rows = frozenset(range(0, sum(LENGTHS), 3))
    plan = llama.plan(chunks, llama.ids(9, 2), GivenRowsSelector.everywhere(sorted(rows)))
    want = llama.full(plan.token_ids)
    monkeypatch.setattr("cacheblend.reference.rows.row_blocks", shifted)
    # A row that reads beyond the prompt may find anything there, not-a-number included.
    assert not max_error(llama.logits(plan), want) <= 1e-2


def test_g4_exact_chunks_stand_where_they_were_encoded(llama):
    chunks: list[ChunkIdentity] = exact_chunks(llama)
    plan = llama.plan(chunks, llama.ids(9, 2), GivenRowsSelector.everywhere(()))
    assert [span.start for span in plan.reused] == [chunk.base_position for chunk in chunks]
