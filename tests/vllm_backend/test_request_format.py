"""What a request may say about reuse, and what it is told when it says it wrongly."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.vllm_backend.request_format import (
    BlendParams,
    CollectParams,
    as_transfer_params,
    check_prompt,
    fingerprint_in,
    parse_params,
    segments_of,
)

LETTERS = "abcXYZ019_-"
NAMES = st.text(LETTERS, min_size=1, max_size=64)
COUNTS = st.integers(1, 50)
PLACES = st.tuples(st.text("0123456789abcdef", min_size=1), st.none() | NAMES)
"""A model's fingerprint and a namespace."""


@st.composite
def plans(draw) -> BlendParams:
    """Any plan that is right: reuse before the question, fresh segments from it on."""
    before = draw(st.lists(st.tuples(COUNTS, st.booleans()), max_size=5))
    after = draw(st.lists(COUNTS, max_size=2))
    parts = [*before, (draw(COUNTS), False), *((tokens, False) for tokens in after)]
    return BlendParams(
        segments=segments_of(parts),
        question=len(before) if after or draw(st.booleans()) else None,
        policy=draw(st.none() | st.sampled_from(Policy)),
        selector=draw(st.none() | st.text(max_size=8)),
        ratio=draw(st.none() | st.floats(0.0, 1.0)),
        head_tokens=draw(st.none() | st.integers(0, 100)),
        check_layers=draw(st.none() | st.lists(st.integers(), max_size=3).map(tuple)),
        rows=draw(st.none() | st.lists(st.integers(), max_size=5).map(tuple)),
        namespace=draw(st.none() | NAMES),
    )


COLLECTS = st.builds(CollectParams, collect=st.integers(0, 10_000), namespace=st.none() | NAMES)


def blend(**fields) -> BlendParams:
    params = parse_params({"cacheblend": fields})
    assert isinstance(params, BlendParams)
    return params


def refusal(given_params) -> str:
    with pytest.raises(BlendError) as raised:
        parse_params({"cacheblend": given_params})
    return str(raised.value)


@settings(max_examples=100, deadline=None)
@given(st.one_of(plans(), COLLECTS))
def test_what_is_sent_as_json_is_what_is_read(params):
    assert parse_params(json.loads(json.dumps(as_transfer_params(params)))) == params


@pytest.mark.parametrize("nothing", [None, {}, {"cacheblend": None}, {"do_remote_decode": True}])
def test_a_request_that_asks_nothing_of_us_has_no_params(nothing):
    assert parse_params(nothing) is None


def test_what_a_request_leaves_open_stays_open():
    params = blend()
    assert params == BlendParams(version=1, segments=())
    open_fields = ("question", "policy", "selector", "ratio", "head_tokens", "check_layers", "rows", "namespace")
    assert {getattr(params, name) for name in open_fields} == {None}


SEGMENTS = [{"tokens": 4}, {"tokens": 4, "reuse": True}, {"tokens": 2}]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"version": 2}, "2"),
        ({"version": None}, "None"),
        ({"version": "1"}, "'1'"),
        ({"version": [1]}, "[1]"),
        ({"segments": 3}, "segments"),
        ({"segments": [3]}, "segments.0"),
        ({"segments": [{"tokens": 1}, {}]}, "segments.1.tokens"),
        ({"segments": [{"tokens": 0}]}, "segments.0.tokens"),
        ({"segments": [{"tokens": -4}]}, "segments.0.tokens"),
        ({"segments": [{"tokens": 1.5}]}, "segments.0.tokens"),
        ({"segments": [{"tokens": 1, "reuse": "perhaps"}]}, "segments.0.reuse"),
        ({"segments": [{"tokens": 1, "key": "ab"}]}, "segments.0.key"),
        ({"segments": SEGMENTS, "question": 3}, "question is 3"),
        ({"segments": SEGMENTS, "question": -1}, "question is -1"),
        ({"segments": SEGMENTS, "question": "last"}, "question"),
        ({"segments": SEGMENTS, "policy": "sometimes"}, "policy"),
        ({"segments": SEGMENTS, "selector": 7}, "selector"),
        ({"segments": SEGMENTS, "ratio": 1.01}, "ratio"),
        ({"segments": SEGMENTS, "ratio": -0.01}, "ratio"),
        ({"segments": SEGMENTS, "ratio": "much"}, "ratio"),
        ({"segments": SEGMENTS, "fidelity": "perfect"}, "fidelity"),
        ({"segments": SEGMENTS, "fidelity": "fast", "ratio": 0.2}, "both given; choose one"),
        ({"segments": SEGMENTS, "primer": [-1]}, "primer"),
        ({"segments": SEGMENTS, "head_tokens": -1}, "head_tokens"),
        ({"segments": SEGMENTS, "check_layers": 1}, "check_layers"),
        ({"segments": SEGMENTS, "check_layers": ["first"]}, "check_layers.0"),
        ({"segments": SEGMENTS, "rows": {"0": 1}}, "rows"),
        ({"segments": SEGMENTS, "rows": [0, None]}, "rows.1"),
        ({"segments": SEGMENTS, "namespace": ""}, "namespace"),
        ({"segments": SEGMENTS, "namespace": "a/b"}, "namespace"),
        ({"segments": SEGMENTS, "namespace": "a.b"}, "namespace"),
        ({"segments": SEGMENTS, "namespace": "a\n"}, "namespace"),
        ({"segments": SEGMENTS, "namespace": "a" * 65}, "namespace"),
        ({"segmets": SEGMENTS}, "segmets"),
        ({"collect": -1}, "collect"),
        ({"collect": "all"}, "collect"),
        ({"collect": None}, "collect"),
        ({"collect": 3, "namespace": "a b"}, "namespace"),
        ({"collect": 3, "segments": SEGMENTS}, "segments"),
        ({"collect": 3, "version": 2}, "2"),
    ],
)
def test_a_malformed_field_is_named_in_one_sentence(wrong, named):
    message = refusal(wrong)
    assert named in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("no_object", ["yes", 1, True, [1], [["version", 1]]])
def test_what_is_no_object_is_refused_with_what_it_is(no_object):
    message = refusal(no_object)
    assert repr(no_object) in message
    assert message.endswith("send an object.")


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(-200, 200))
def test_segments_cover_exactly_the_prompt_that_was_counted(params, off):
    total = sum(segment.tokens for segment in params.segments)
    bounds = params.bounds(total)
    assert [end - start for start, end in bounds] == [segment.tokens for segment in params.segments]
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == total
    check_prompt(params, total)
    if off:
        with pytest.raises(BlendError, match=f"count {total} tokens, but the prompt has {total + off};"):
            check_prompt(params, total + off)


def test_a_plan_without_segments_fits_every_prompt_and_covers_none():
    check_prompt(BlendParams(), 10)
    with pytest.raises(BlendError, match="count 0 tokens"):
        BlendParams().bounds(10)


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_nothing_is_reused_from_the_question_on(params, data):
    fields = as_transfer_params(params)["cacheblend"]
    index = data.draw(st.integers(params.question_index, len(params.segments) - 1))
    fields["segments"][index]["reuse"] = True
    assert "always computed" in refusal(fields)


def test_the_last_segment_asks_unless_another_one_is_named():
    assert blend(segments=SEGMENTS).question_index == 2
    assert blend(segments=[*SEGMENTS, {"tokens": 1}], question=2).question_index == 2


def test_a_request_that_collects_names_its_prefix():
    params = parse_params({"cacheblend": {"collect": 4, "namespace": "x"}})
    assert params == CollectParams(collect=4, namespace="x")
    check_prompt(params, 5)
    for prompt_tokens in (4, 3, 0):
        with pytest.raises(BlendError, match=f"prompt of {prompt_tokens} tokens behind a prefix of 4 has no chunk"):
            check_prompt(params, prompt_tokens)


@settings(max_examples=100, deadline=None)
@example(("a", "bc"), ("ab", "c"))
@example(("abc", None), ("ab", "c"))
@given(PLACES, PLACES)
def test_chunks_of_two_namespaces_never_share_a_fingerprint(place, other):
    assert (fingerprint_in(*place) == fingerprint_in(*other)) == (place == other)


def test_without_a_namespace_the_fingerprint_is_the_models_own():
    assert fingerprint_in("abc", None) == "abc"
