"""Which chunks become a primer, and what chunks are stored behind then."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.key import content_digest
from pipelines.primer import PRIMER_TOKENS, ChunkPrefixes, choose_primer

HEAD = (1, 2, 3)
BOS = (1,)
PRIMER = ((4, 5), (6, 7, 8))

chunk_ids = st.lists(st.integers(0, 50_000), min_size=1, max_size=12).map(tuple)
corpora = st.lists(chunk_ids, max_size=60)
few = settings(max_examples=60, deadline=None)


@few
@given(corpora, st.integers(0, 80), st.randoms(use_true_random=False))
def test_the_primer_depends_on_the_set_of_chunks_alone(
    corpus: list[tuple[int, ...]], tokens: int, order: random.Random
):
    repeated = [*corpus, *order.choices(corpus, k=len(corpus))] if corpus else []
    order.shuffle(repeated)
    assert choose_primer(repeated, tokens) == choose_primer(corpus, tokens)


@few
@given(corpora, st.integers(0, 80))
def test_the_primer_is_whole_distinct_chunks_within_both_bounds(corpus: list[tuple[int, ...]], tokens: int):
    primer = choose_primer(corpus, tokens)
    assert len(set(primer)) == len(primer)
    assert set(primer) <= set(corpus)
    used = sum(map(len, primer))
    assert used <= tokens
    assert used * 8 <= sum(map(len, set(corpus)))


@few
@given(corpora, st.integers(0, 80))
def test_the_primer_begins_the_chunks_by_digest_and_the_next_one_would_not_fit(
    corpus: list[tuple[int, ...]], tokens: int
):
    primer = choose_primer(corpus, tokens)
    ordered = sorted(set(corpus), key=content_digest)
    assert list(primer) == ordered[: len(primer)]
    if len(primer) < len(ordered):
        with_next = sum(map(len, ordered[: len(primer) + 1]))
        assert with_next > tokens or with_next * 8 > sum(map(len, ordered))


def test_a_large_corpus_has_a_primer_of_about_a_thousand_tokens_and_a_small_one_none():
    chunks = [tuple(range(n, n + 100)) for n in range(1000)]
    assert sum(map(len, choose_primer(chunks))) == PRIMER_TOKENS // 100 * 100
    assert choose_primer(chunks[:7]) == ()
    assert len(choose_primer(chunks[:8])) == 1
    assert choose_primer([]) == ()


def test_a_chunk_is_stored_behind_head_and_primer_which_is_one_object_for_all():
    prefixes = ChunkPrefixes(HEAD, PRIMER)
    assert prefixes.primer == (4, 5, 6, 7, 8)
    assert prefixes.behind((9,)) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert prefixes.behind((9,)) is prefixes.behind((10,))


@pytest.mark.parametrize("chunk", PRIMER)
def test_a_chunk_of_the_primer_never_sees_itself(chunk: tuple[int, ...]):
    prefixes = ChunkPrefixes(HEAD, PRIMER)
    assert prefixes.behind(chunk) == HEAD
    assert prefixes.candidates(chunk, BOS) == [HEAD, BOS]


def test_the_best_version_is_looked_for_first_and_none_twice():
    assert ChunkPrefixes(HEAD, PRIMER).candidates((9,), BOS) == [(*HEAD, 4, 5, 6, 7, 8), HEAD, BOS]
    assert ChunkPrefixes(HEAD).candidates((9,), ()) == [HEAD]
    assert ChunkPrefixes(BOS, PRIMER).candidates((9,), BOS) == [(1, 4, 5, 6, 7, 8), BOS]
    assert ChunkPrefixes((), PRIMER).candidates((9,), BOS) == [(4, 5, 6, 7, 8), (), BOS]


def test_chunks_are_grouped_by_what_they_are_stored_behind():
    prefixes = ChunkPrefixes(HEAD, PRIMER)
    groups = prefixes.groups([(9,), PRIMER[1], (10,), PRIMER[0]])
    assert groups == [(prefixes.primed, [(9,), (10,)]), (HEAD, [PRIMER[1], PRIMER[0]])]
