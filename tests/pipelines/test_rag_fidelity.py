"""Fidelity instead of a ratio: what it selects, what it overrides, and what it does not go with."""

from __future__ import annotations

import asyncio

import pytest

from cacheblend.errors import BlendError
from cacheblend.fidelity import Fidelity
from pipelines.config import make_config
from pipelines.errors import PipelineError

DOCUMENTS = [f"The mill of Harrow burned in {year}; its owner rebuilt it in stone." for year in range(1841, 1845)]
QUESTION = "When did the mill of Harrow burn?"


def selected(settings, call):
    """The selector of a call, as accounts name it."""
    return make_config(selector="query", **settings).make_selector(**call).spec


@pytest.fixture(scope="module")
def rag(make_rag):
    """Short documents, precomputed, all of them used; settings name the fidelity `fast`."""
    pipeline = make_rag(DOCUMENTS, fidelity="fast", top_k=len(DOCUMENTS))
    pipeline.precompute()
    return pipeline


def test_every_way_to_ask_takes_a_fidelity_and_the_account_names_its_ratio(rag):
    async def asynchronously(**options):
        pieces = rag.astream(QUESTION, **options)
        async for _ in pieces:
            pass
        return [await rag.arun(QUESTION, **options), await pieces.answer()]

    for options, ratio in [({}, 0.05), ({"fidelity": "balanced"}, 0.15), ({"fidelity": Fidelity.FAITHFUL}, 0.3)]:
        stream = rag.stream(QUESTION, **options)
        list(stream)
        answers = [rag.run(QUESTION, **options), *rag.run_batch([QUESTION], **options), stream.answer]
        answers += asyncio.run(asynchronously(**options))
        assert {answer.meta.selector for answer in answers} == {f"query(ratio={ratio})+drift"}


def test_a_higher_fidelity_recomputes_more_rows(rag):
    fast, balanced, faithful = (rag.run(QUESTION, selector="query", fidelity=fidelity).meta for fidelity in Fidelity)
    assert 0 < fast.recomputed_tokens < balanced.recomputed_tokens < faithful.recomputed_tokens
    assert faithful.recomputed_ratio == pytest.approx(Fidelity.FAITHFUL.ratio, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "call", "spec"),
    [
        ({"fidelity": "faithful"}, {}, "query(ratio=0.3)"),
        ({"fidelity": "faithful"}, {"fidelity": "fast"}, "query(ratio=0.05)"),
        ({"fidelity": "faithful"}, {"ratio": 0.4}, "query(ratio=0.4)"),
        ({"fidelity": "faithful"}, {"ratio": 0.0}, "query(ratio=0.0)"),
        ({"ratio": 0.4}, {"fidelity": "fast"}, "query(ratio=0.05)"),
        ({"ratio": 0.4}, {"name": "query", "fidelity": "fast"}, "query(ratio=0.05)"),
        ({"ratio": 0.4}, {}, "query(ratio=0.4)"),
        ({}, {"name": "deviation", "fidelity": "fast"}, "deviation(ratio=0.05,check=1)"),
    ],
)
def test_what_a_call_says_takes_the_place_of_the_settings_ratio_or_fidelity(settings, call, spec):
    assert selected(settings, call) == spec


def test_a_call_with_another_selector_starts_from_its_defaults_and_not_from_the_settings_fidelity():
    assert selected({"fidelity": "faithful"}, {"name": "deviation"}) == "deviation(ratio=0.15,check=1)"
    assert selected({"fidelity": "faithful"}, {"name": "none"}) == "none"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fidelity": "perfect"}, PipelineError, "Fidelity 'perfect' is unknown; use one of fast, balanced, faithful"),
        ({"fidelity": "fast", "ratio": 0.3}, PipelineError, "Fidelity 'fast' and ratio 0.3 are both given; give one"),
        ({"fidelity": "fast", "ratio": 0.05}, PipelineError, "are both given"),
        ({"fidelity": "fast", "selector": "none"}, PipelineError, r"'none' takes no fidelity \(got 'fast'\)"),
        ({"fidelity": "fast", "selector": "full"}, PipelineError, "'full' takes no fidelity"),
        ({"fidelity": "fast", "selector": "nearest"}, BlendError, "'nearest' is unknown"),
        ({"fidelity": "fast", "head_tokens": -1}, BlendError, "-1"),
    ],
)
def test_a_fidelity_that_cannot_be_is_refused_in_one_sentence(rag, options, error, words):
    with pytest.raises(error, match=words) as caught:
        rag.prepare(QUESTION, **options)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fidelity": "perfect"}, "Setting 'fidelity' cannot be 'perfect': Input should be 'fast', 'balanced'"),
        ({"fidelity": "fast", "ratio": 0.3}, "Fidelity 'fast' and ratio 0.3 are both given; give one of them"),
        ({"fidelity": "fast", "selector": "none"}, "'none' takes no fidelity"),
    ],
)
def test_settings_are_refused_the_same_way(settings, words):
    with pytest.raises(PipelineError, match=words):
        make_config(**settings)


def test_a_call_says_whether_drift_is_carried_and_the_account_does(rag):
    assert rag.run(QUESTION).meta.selector == "query(ratio=0.05)+drift"
    assert rag.run(QUESTION, carry_drift=False).meta.selector == "query(ratio=0.05)"
