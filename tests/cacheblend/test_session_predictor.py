"""`SessionPredictor`: what it advises, how sure it is, that this comes true, and that it forgets."""

from __future__ import annotations

import pickle
import random

import pytest
from cacheblend_samples import identity_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.protocols import CandidatesSeen, QuestionFinished, QuestionQueued, QuestionStarted, TokensGenerated
from cacheblend.scheduling.session_predictor import HORIZON, SessionPredictor

A, B, C, D, E = (identity_of(i) for i in range(1, 6))


def predictor(*events):
    made = SessionPredictor()
    for event in events:
        made.observe(event)
    return made


def confidences(made, limit=99):
    return {piece.chunk: piece.confidence for piece in made.advice(limit)}


def ask(made, name, session, chunks, candidates=(), tokens=20):
    """A whole question, from the queue to its answer's end."""
    made.observe(QuestionQueued(name, tuple(chunks), session))
    made.observe(CandidatesSeen(name, tuple(candidates)))
    made.observe(QuestionStarted(name))
    for _ in range(tokens):
        made.observe(TokensGenerated(name, (1,)))
    made.observe(QuestionFinished(name))


def others(made, number, name="other"):
    """Questions that have nothing to do with any session."""
    for i in range(number):
        ask(made, f"{name}-{i}", f"{name}-{i}", [])


def test_chunks_of_queued_questions_come_first_in_the_order_of_the_queue_each_once():
    made = predictor(QuestionQueued("1", (B, A), "s"), QuestionQueued("2", (C, A), "t"), QuestionQueued("3", (D,)))
    advice = made.advice(99)
    assert [piece.chunk for piece in advice[:4]] == [B, A, C, D]
    assert {piece.confidence for piece in advice[:4]} == {0.95}
    assert [piece.chunk for piece in made.advice(2)] == [B, A]
    assert made.advice(0) == []


def test_questions_that_are_aborted_before_they_start_lower_the_confidence_in_the_queue():
    made = predictor(QuestionQueued("1", (A,), "s"))
    sure = confidences(made)[A]
    for i in range(200):
        made.observe(QuestionQueued(f"a{i}", (B,), f"a{i}"))
        made.observe(QuestionFinished(f"a{i}"))
    assert confidences(made)[A] < sure / 2


def test_a_question_that_has_started_is_advised_no_more_but_for_its_sessions_next_turn():
    made = predictor(QuestionQueued("1", (A,), "s"), QuestionQueued("2", (B,), "t"))
    made.observe(QuestionStarted("1"))
    advice = made.advice(99)
    assert advice[0].chunk == B
    assert confidences(made).get(A, 0.0) < 0.9


def test_a_question_told_twice_counts_once():
    """A restarted process may be told of a queued question twice."""
    made = predictor(QuestionQueued("1", (A,), "s"), QuestionQueued("1", (A,), "s"))
    once = predictor(QuestionQueued("1", (A,), "s"))
    assert pickle.dumps(made) == pickle.dumps(once)


def test_how_often_documents_reappear_is_learned_by_how_many_turns_ago_they_were_used():
    """Every document comes back a turn later and never after that."""
    made = SessionPredictor()
    for i in range(40):
        for turn in range(6):
            ask(made, f"{i}.{turn}", f"s{i}", [identity_of(1000 + 10 * i + turn), identity_of(1001 + 10 * i + turn)])
    ask(made, "a", "new", [A])
    ask(made, "b", "new", [A, B])
    now = confidences(made)
    assert now[B] > 0.7 * max(now.values())
    assert now[B] > 5 * now.get(A, 0.0)


def test_confidence_rises_as_an_answer_nears_the_length_that_answers_have():
    made = SessionPredictor()
    for turn in range(30):
        ask(made, f"{turn}", "s", [A], tokens=64)
    made.observe(QuestionQueued("now", (A,), "s"))
    made.observe(QuestionStarted("now"))
    seen = []
    for _ in range(6):
        seen.append(confidences(made).get(A, 0.0))
        made.observe(TokensGenerated("now", (1,) * 10))
    assert seen == sorted(seen)
    assert seen[-1] > 2 * seen[0]


def test_a_session_that_stays_away_for_longer_than_sessions_do_fades():
    made = SessionPredictor()
    for i in range(30):
        for turn in range(4):
            ask(made, f"{i}.{turn}", f"s{i}", [identity_of(100 + i)])
    ask(made, "a", "gone", [A])
    fresh = confidences(made)[A]
    others(made, 64)
    assert confidences(made).get(A, 0.0) < fresh / 3


def test_candidates_are_believed_as_far_as_later_turns_picked_them():
    """The first candidate is always picked a turn later, the second one never."""
    made = SessionPredictor()
    for i in range(20):
        session, chunks = f"s{i}", [identity_of(100 + 50 * i + turn) for turn in range(6)]
        for turn in range(5):
            never = identity_of(140 + 50 * i + turn)
            ask(made, f"{i}.{turn}", session, chunks[: turn + 1], [chunks[turn + 1], never])
    ask(made, "a", "new", [A], [B, C])
    now = confidences(made)
    assert now[B] > 0.6 * now[A]
    assert now.get(C, 0.0) < now[B] / 4


def test_what_many_sessions_use_is_advised_to_a_session_that_has_not_used_it():
    made = SessionPredictor()
    for i in range(100):
        ask(made, f"{i}", f"s{i}", [A, identity_of(100 + i)] if i % 2 else [identity_of(100 + i)])
    others(made, 3)
    now = confidences(made)
    assert now[A] == max(now.values()) > 0.8


def test_questions_without_a_session_are_taken_for_turns_of_one():
    made = SessionPredictor()
    for i in range(30):
        ask(made, f"{i}", None, [A, identity_of(100 + i)])
    now = confidences(made)
    assert now[A] > 0.8
    assert now.get(identity_of(129), 0.0) < 0.2


def test_confidence_is_the_share_that_comes_true():
    """Many sessions at a time, whose documents come back with 0.7: what is said with p is used with about p."""
    draw = random.Random(1)
    made = SessionPredictor()
    sessions = {f"s{i}": [identity_of(1000 * i + 7)] for i in range(24)}
    history, said = [], []
    for number in range(1200):
        name = draw.choice(sorted(sessions))
        kept = [chunk for chunk in sessions[name] if draw.random() < 0.7]
        sessions[name] = [*kept, identity_of(100_000 + number)]
        ask(made, str(number), name, sessions[name])
        history.append({chunk.key for chunk in sessions[name]})
        if number >= 300 and number % 5 == 0:
            said += [(number, piece) for piece in made.advice(64)]
    judged = []
    for number, piece in said:
        following = history[number + 1 : number + 1 + HORIZON]
        if len(following) == HORIZON:
            judged.append((piece.confidence, any(piece.chunk.key in used for used in following)))
    for low, high in ((0.0, 0.2), (0.2, 0.8)):
        part = [pair for pair in judged if low <= pair[0] < high]
        assert len(part) > 100
        share = sum(hit for _, hit in part) / len(part)
        assert share == pytest.approx(sum(sure for sure, _ in part) / len(part), abs=0.1)


def test_memory_is_bounded_whatever_comes():
    made = SessionPredictor(sessions=16, documents=8, questions=32, popular=64)
    sizes = []
    for number in range(4000):
        chunk = identity_of(number)
        made.observe(QuestionQueued(f"q{number}", (chunk, identity_of(number + 1)), f"s{number // 3}"))
        made.observe(CandidatesSeen(f"q{number}", (identity_of(number + 2),)))
        if number % 3:
            made.observe(QuestionStarted(f"q{number}"))
            made.observe(TokensGenerated(f"q{number}", (1,)))
        if number % 1000 == 999:
            sizes.append(len(pickle.dumps(made)))
    assert max(sizes) < 1.1 * sizes[0]


EVENTS = st.one_of(
    st.builds(
        QuestionQueued,
        st.sampled_from("abcd"),
        st.lists(st.sampled_from([A, B, C]), max_size=3).map(tuple),
        st.sampled_from(["s", "t", None]),
    ),
    st.builds(CandidatesSeen, st.sampled_from("abcd"), st.lists(st.sampled_from([C, D, E]), max_size=3).map(tuple)),
    st.builds(QuestionStarted, st.sampled_from("abcd")),
    st.builds(TokensGenerated, st.sampled_from("abcd"), st.just((1, 2))),
    st.builds(QuestionFinished, st.sampled_from("abcd")),
)


@settings(max_examples=100, deadline=None)
@given(events=st.lists(EVENTS, max_size=25), limit=st.integers(0, 6))
def test_advice_is_sorted_within_zero_and_one_names_no_chunk_twice_and_keeps_the_limit(events, limit):
    advice = predictor(*events).advice(limit)
    sure = [piece.confidence for piece in advice]
    assert len(advice) <= limit
    assert sure == sorted(sure, reverse=True)
    assert all(0 < confidence <= 1 for confidence in sure)
    assert len({piece.chunk.key for piece in advice}) == len(advice)
