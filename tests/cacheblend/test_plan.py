"""Plans: positions, fresh and full variants, refusals."""

from __future__ import annotations

import pytest
from cacheblend_samples import identity_of, plan_of

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Segment, SegmentRole, full_prefill_plan, require_fits, require_known
from cacheblend.selectors import make_selector

A, B = identity_of(1, 3), identity_of(2, 5)


def test_segments_are_laid_out_without_gaps_and_in_order():
    plan = plan_of([A, B], question=(1, 2), system=(9, 9, 9, 9))
    assert [(span.start, span.end, span.length) for span in plan.spans] == [
        (0, 4, 4),
        (4, 7, 3),
        (7, 12, 5),
        (12, 14, 2),
    ]
    assert plan.length == 14
    assert plan.token_ids == (9, 9, 9, 9, *A.token_ids, *B.token_ids, 1, 2)
    assert [plan.token_ids[s.start : s.end] for s in plan.spans] == [s.token_ids for s in plan.segments]
    assert (plan.question.start, plan.question.end) == (12, 14)


def test_reused_spans_tokens_and_keys_are_those_of_reused_segments_alone():
    fresh = Segment(SegmentRole.CHUNK, (5, 5), reason="missing")
    segments = (*plan_of([A]).segments[:1], fresh, *plan_of([B, A]).segments)
    plan = BlendPlan(segments, make_selector("none"))
    assert [(span.start, span.end) for span in plan.reused] == [(0, 3), (5, 10), (10, 13)]
    assert plan.reused_tokens == 11
    assert plan.keys == (A.key, B.key, A.key)
    assert plan.fallback_reasons == ("missing",)


@pytest.mark.parametrize(
    ("selector", "read"),
    [
        (make_selector("none"), (A, B)),
        (make_selector("query", 0.999), (A, B)),
        (make_selector("query", 1.0), ()),
        (make_selector("deviation", 1.0), ()),
        (make_selector("full"), ()),
    ],
    ids=lambda value: getattr(value, "spec", None),
)
def test_a_plan_reads_each_of_its_chunks_once_unless_every_row_of_them_is_computed_anyway(selector, read):
    plan = plan_of([A, B, A], selector)
    assert (plan.chunks, plan.chunks_read) == ((A, B), read)
    assert plan.as_full().chunks_read == ()


def test_with_fresh_changes_the_named_chunks_everywhere_and_nothing_else():
    plan = plan_of([A, B, A], system=(9,))
    changed = plan.with_fresh({A.key: "checksum", identity_of(3).key: "missing"})
    assert [s.reused for s in changed.segments] == [False, False, True, False, False]
    assert [s.reason for s in changed.segments] == [None, "checksum", None, "checksum", None]
    assert changed.token_ids == plan.token_ids
    assert changed.selector is plan.selector
    assert changed.fallback_reasons == ("checksum", "checksum")
    assert plan.keys == (A.key, B.key, A.key)
    assert plan.with_fresh({}) == plan


def test_as_full_reuses_nothing_and_keeps_the_reasons_it_had():
    plan = plan_of([A, B]).with_fresh({A.key: "missing"})
    full = plan.as_full("auto_full_cheaper")
    assert full.reused == ()
    assert full.selector is None
    assert full.token_ids == plan.token_ids
    assert full.fallback_reasons == ("missing", "auto_full_cheaper")
    assert plan_of([A]).as_full().fallback_reasons == ()


def test_a_full_prefill_plan_is_one_question():
    plan = full_prefill_plan([3, 1, 2])
    assert plan.token_ids == (3, 1, 2)
    assert plan.reused == ()
    assert plan.question.start == 0


QUESTION = Segment(SegmentRole.QUESTION, (1,))
CHUNK = Segment(SegmentRole.CHUNK, A.token_ids, A)


@pytest.mark.parametrize(
    ("segments", "selector", "words"),
    [
        ((), None, "ends with the question"),
        ((CHUNK,), "none", "ends with the question"),
        ((QUESTION, QUESTION), None, "one question"),
        ((Segment(SegmentRole.QUESTION, A.token_ids, A),), "none", "always recomputed"),
        ((CHUNK, QUESTION), None, "needs a selector"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(segments, selector, words):
    with pytest.raises(BlendError, match=words):
        BlendPlan(segments, make_selector(selector) if selector else None)


def test_an_empty_segment_is_refused_by_its_role():
    with pytest.raises(BlendError, match="system segment has no tokens"):
        Segment(SegmentRole.SYSTEM, ())
    with pytest.raises(BlendError, match="question segment has no tokens"):
        full_prefill_plan([])


def test_a_segment_whose_ids_differ_from_its_chunks_is_refused():
    with pytest.raises(BlendError, match="differ from its chunk's"):
        Segment(SegmentRole.CHUNK, (1, 2, 3), A)


def test_prompt_and_answer_must_fit_to_the_last_row():
    require_fits(90, 10, 100)
    with pytest.raises(BlendError, match=r"91 tokens and 10 new ones do not fit .* 100"):
        require_fits(91, 10, 100)


def test_token_ids_must_be_in_the_vocabulary():
    require_known((0, 255), 256)
    for strange in (256, -1):
        with pytest.raises(BlendError, match=rf"Token id {strange} is outside .* 256"):
            require_known((0, strange), 256)
