"""What is known of a request follows from its plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from connector_samples import identity_of, ids_of, plan_of

from cacheblend.plan import Policy
from cacheblend.selectors import make_selector
from cacheblend.vllm_backend.tracking import Tracked


@pytest.mark.parametrize(
    ("selector", "end"),
    [
        (make_selector("none"), 4),
        (make_selector("deviation", 0.25), 4),
        (make_selector("query", 0.25), 9),
        (make_selector("chunk_head+query", 0.25), 9),
        (make_selector("query", 1.0), 4),
        (make_selector("full"), 4),
    ],
    ids=lambda value: getattr(value, "spec", None),
)
def test_a_blend_ends_with_the_last_chunk_unless_the_question_chooses_rows(selector, end):
    plan = plan_of([identity_of(1, tokens=4), ids_of(2, tokens=5)], selector, question=(7, 8, 9))
    request = SimpleNamespace(request_id="a", num_tokens=plan.length)
    assert Tracked(request, None, Policy.BLEND, None, plan).end == end
