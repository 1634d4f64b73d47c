"""`LookAheadPredictor`: in which order, and how surely, chunks will be wanted."""

from __future__ import annotations

import pytest
from cacheblend_samples import identity_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.protocols import CandidatesSeen, QuestionFinished, QuestionQueued, QuestionStarted, TokensGenerated
from cacheblend.scheduling.lookahead_predictor import CANDIDATE_CONFIDENCE, LookAheadPredictor

A, B, C, D, E = (identity_of(i) for i in range(1, 6))


def predictor(*events):
    made = LookAheadPredictor()
    for event in events:
        made.observe(event)
    return made


def pieces(made, limit=99):
    return [(piece.chunk, piece.confidence) for piece in made.advice(limit)]


def test_chunks_of_earlier_questions_come_first_in_the_order_they_are_used():
    made = predictor(QuestionQueued("1", (B, A)), QuestionQueued("2", (C,)), QuestionQueued("3", (D,)))
    assert pieces(made) == [(B, 1.0), (A, 1.0), (C, 0.5), (D, pytest.approx(1 / 3))]


def test_candidates_beyond_top_k_are_less_likely_and_fall_with_their_rank():
    made = predictor(QuestionQueued("1", (A,)), CandidatesSeen("1", (B, C)), QuestionQueued("2", (D,)))
    assert pieces(made) == [(A, 1.0), (D, 0.5), (B, CANDIDATE_CONFIDENCE), (C, CANDIDATE_CONFIDENCE / 2)]


def test_a_chunk_wanted_several_times_has_the_highest_of_its_confidences():
    """A candidate of the first question that the second one uses is wanted as surely as the second question is."""
    made = predictor(QuestionQueued("1", (A,)), CandidatesSeen("1", (B, C)), QuestionQueued("2", (B, A)))
    assert pieces(made) == [(A, 1.0), (B, 0.5), (C, CANDIDATE_CONFIDENCE / 2)]
    late = predictor(*(QuestionQueued(str(i), (A,)) for i in range(9)), QuestionQueued("9", (B,)))
    late.observe(CandidatesSeen("0", (B,)))
    assert pieces(late) == [(A, 1.0), (B, CANDIDATE_CONFIDENCE)]


def test_the_limit_keeps_the_most_confident_pieces():
    made = predictor(QuestionQueued("1", (A, B)), QuestionQueued("2", (C,)), CandidatesSeen("2", (D,)))
    assert [chunk for chunk, _ in pieces(made, 3)] == [A, B, C]
    assert pieces(made, 0) == []


def test_finished_questions_vanish_with_their_candidates_and_the_queue_moves_up():
    made = predictor(QuestionQueued("1", (A,)), CandidatesSeen("1", (B,)), QuestionQueued("2", (C,)))
    made.observe(QuestionFinished("1"))
    assert pieces(made) == [(C, 1.0)]
    made.observe(QuestionFinished("2"))
    made.observe(QuestionFinished("nobody"))
    assert pieces(made) == []


def test_generated_tokens_change_nothing():
    made = predictor(QuestionQueued("1", (A,)))
    made.observe(TokensGenerated("1", (1, 2, 3)))
    assert pieces(made) == [(A, 1.0)]


EVENTS = st.one_of(
    st.builds(QuestionQueued, st.sampled_from("abc"), st.lists(st.sampled_from([A, B, C]), max_size=3).map(tuple)),
    st.builds(CandidatesSeen, st.sampled_from("abc"), st.lists(st.sampled_from([C, D, E]), max_size=3).map(tuple)),
    st.builds(QuestionStarted, st.sampled_from("abc")),
    st.builds(QuestionFinished, st.sampled_from("abc")),
)


@settings(max_examples=80, deadline=None)
@given(events=st.lists(EVENTS, max_size=12), limit=st.integers(0, 6))
def test_advice_is_sorted_within_zero_and_one_names_no_chunk_twice_and_keeps_the_limit(events, limit):
    given_now = predictor(*events).advice(limit)
    confidences = [piece.confidence for piece in given_now]
    assert len(given_now) <= limit
    assert confidences == sorted(confidences, reverse=True)
    assert all(0 < confidence <= 1 for confidence in confidences)
    assert len({piece.chunk.key for piece in given_now}) == len(given_now)
