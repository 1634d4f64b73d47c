"""From ids and params to a plan: what is reused, what is fresh and why, and who chooses the rows."""

from __future__ import annotations

import pytest
from connector_samples import MODEL, identity_of, ids_of, put

from cacheblend.errors import BlendError
from cacheblend.plan import Policy, SegmentRole
from cacheblend.selectors import make_selector
from cacheblend.selectors.chunk_head import ChunkHeadSelector
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.vllm_backend.directory import ChunkDirectory
from cacheblend.vllm_backend.planner import Planner
from cacheblend.vllm_backend.request_format import BlendParams, CollectParams, segments_of
from cacheblend.vllm_backend.settings import ConnectorSettings
from kvstore.key import ChunkIdentity

BOS = 1
LAYERS = 4
LONGEST = 1000
HEAD = (BOS, 50, 51)
QUESTION = (70, 71)


@pytest.fixture
def planner_of(tmp_path):
    """Makes planners over the folder `tmp_path`."""

    def make(bos: int | None = BOS, **settings) -> Planner:
        return Planner(MODEL, ChunkDirectory(tmp_path, 1), ConnectorSettings(**settings), LAYERS, LONGEST, bos)

    return make


def laid_out(planner, *parts, **options):
    """The plan of a prompt of (ids, reuse) pairs."""
    ids = tuple(token for tokens, _ in parts for token in tokens)
    segments = segments_of([(len(tokens), reuse) for tokens, reuse in parts])
    return planner.plan(ids, BlendParams(segments=segments, **options))


def one_chunk(planner, head=HEAD, **options):
    """The plan's segment of chunk 1 behind `head`."""
    parts = [(head, False)] if head else []
    plan = laid_out(planner, *parts, (ids_of(1), True), (QUESTION, False), **options)
    return plan.segments[len(parts)]


def test_segments_keep_their_ids_and_order_and_those_that_are_cached_are_reused(planner_of, tmp_path):
    for seed in (1, 2):
        put(tmp_path, identity_of(seed, prefix=HEAD))
    parts = [HEAD, ids_of(2), ids_of(9), ids_of(1), QUESTION]
    plan = laid_out(planner_of(), *zip(parts, (False, True, False, True, False), strict=True))
    assert [segment.token_ids for segment in plan.segments] == parts
    wanted = [None, identity_of(2, prefix=HEAD), None, identity_of(1, prefix=HEAD), None]
    assert [segment.identity for segment in plan.segments] == wanted
    assert plan.fallback_reasons == ()


def test_what_precedes_the_first_reused_chunk_is_the_systems_and_what_follows_are_chunks(planner_of):
    plan = laid_out(
        planner_of(),
        (HEAD, False),
        (ids_of(3), False),
        (ids_of(1), True),
        (ids_of(4), False),
        (ids_of(2), True),
        (QUESTION, False),
    )
    system, chunk, question = SegmentRole.SYSTEM, SegmentRole.CHUNK, SegmentRole.QUESTION
    assert [segment.role for segment in plan.segments] == [system, system, chunk, chunk, chunk, question]


def test_what_follows_the_question_is_not_in_the_plan(planner_of, tmp_path):
    put(tmp_path, identity_of(1))
    plan = laid_out(planner_of(), (ids_of(1), True), (QUESTION, False), ((80, 81, 82), False), question=1)
    assert plan.token_ids == (*ids_of(1), *QUESTION)
    assert plan.question.segment.token_ids == QUESTION


def test_a_prompt_of_the_question_alone_reuses_nothing(planner_of):
    plan = laid_out(planner_of(), (QUESTION, False))
    assert [segment.role for segment in plan.segments] == [SegmentRole.QUESTION]


def test_a_chunk_that_cannot_be_had_is_fresh_with_its_reason_and_the_others_are_reused(planner_of, tmp_path):
    put(tmp_path, identity_of(2))
    plan = laid_out(planner_of(), (ids_of(1), True), (ids_of(2), True), (QUESTION, False))
    assert [segment.reused for segment in plan.segments] == [False, True, False]
    assert plan.segments[0].reason == "missing"
    assert plan.fallback_reasons == ("missing",)


def test_the_prefix_is_the_requests_head_then_the_bos(planner_of, tmp_path):
    for prefix in ((BOS,), HEAD):
        put(tmp_path, identity_of(1, prefix=prefix))
        assert one_chunk(planner_of()).identity == identity_of(1, prefix=prefix)


def test_a_chunk_encoded_behind_nothing_serves_only_who_asks_for_that(planner_of, tmp_path):
    put(tmp_path, identity_of(1))
    assert one_chunk(planner_of()).reason == "prefix_changed"
    assert one_chunk(planner_of(), prefix=0).identity == identity_of(1)


def test_all_fresh_segments_before_the_first_reused_one_are_the_head(planner_of, tmp_path):
    put(tmp_path, identity_of(1, prefix=(*HEAD, *ids_of(3))))
    plan = laid_out(planner_of(), (HEAD, False), (ids_of(3), False), (ids_of(1), True), (QUESTION, False))
    assert plan.segments[2].identity == identity_of(1, prefix=(*HEAD, *ids_of(3)))


def test_a_later_chunk_is_looked_for_behind_the_head_and_never_behind_its_neighbours(planner_of, tmp_path):
    put(tmp_path, identity_of(2, prefix=HEAD))
    put(tmp_path, identity_of(2, prefix=(*HEAD, *ids_of(1))))
    plan = laid_out(planner_of(), (HEAD, False), (ids_of(1), True), (ids_of(2), True), (QUESTION, False))
    assert plan.segments[2].identity == identity_of(2, prefix=HEAD)


def test_a_chunk_behind_head_and_primer_comes_before_one_behind_the_head(planner_of, tmp_path):
    put(tmp_path, identity_of(1, prefix=HEAD))
    assert one_chunk(planner_of(), primer=ids_of(5)).identity == identity_of(1, prefix=HEAD)
    put(tmp_path, identity_of(1, prefix=(*HEAD, *ids_of(5))))
    assert one_chunk(planner_of(), primer=ids_of(5)).identity == identity_of(1, prefix=(*HEAD, *ids_of(5)))
    assert one_chunk(planner_of()).identity == identity_of(1, prefix=HEAD), "no primer was asked for"


def test_a_chunk_stored_beyond_the_engines_longest_prompt_is_not_used(planner_of, tmp_path):
    primer = tuple(range(100, 100 + LONGEST))
    put(tmp_path, identity_of(1, prefix=(*HEAD, *primer)))
    assert one_chunk(planner_of(), primer=primer).reason == "prefix_changed"
    put(tmp_path, identity_of(1, prefix=HEAD))
    assert one_chunk(planner_of(), primer=primer).identity == identity_of(1, prefix=HEAD)


def test_a_chunk_behind_another_primer_is_prefix_changed(planner_of, tmp_path):
    put(tmp_path, identity_of(1, prefix=(*HEAD, *ids_of(5))))
    assert one_chunk(planner_of(), primer=ids_of(6)).reason == "prefix_changed"
    assert one_chunk(planner_of()).reason == "prefix_changed"


@pytest.mark.parametrize("settings", [{}, {"carry_drift": False}])
def test_a_request_says_whether_drift_is_carried_or_the_server_does(planner_of, settings):
    parts = [(HEAD, False), (ids_of(1), True), (QUESTION, False)]
    planner = planner_of(**settings)
    said = [laid_out(planner, *parts, carry_drift=wish).carry_drift for wish in (None, True, False)]
    assert said == [not settings, True, False]


def test_a_chunk_behind_another_head_is_prefix_changed(planner_of, tmp_path):
    put(tmp_path, identity_of(1, prefix=(2, 3)))
    assert one_chunk(planner_of()).reason == "prefix_changed"


def test_a_model_without_a_bos_does_not_look_behind_one(planner_of, tmp_path):
    put(tmp_path, identity_of(1, prefix=(BOS,)))
    assert one_chunk(planner_of()).identity == identity_of(1, prefix=(BOS,))
    assert one_chunk(planner_of(bos=None)).reason == "prefix_changed"


def test_a_prompt_that_begins_with_a_chunk_has_no_head(planner_of, tmp_path):
    put(tmp_path, identity_of(1))
    assert one_chunk(planner_of(), head=()).identity == identity_of(1)


def test_a_namespace_finds_its_own_chunks_and_no_others(planner_of, tmp_path):
    planner = planner_of()
    ids = (*HEAD, *ids_of(1))
    collected = planner.chunk(ids, CollectParams(collect=len(HEAD), namespace="tenant"))
    assert one_chunk(planner, namespace="tenant").reason == "missing"
    put(tmp_path, identity_of(1, prefix=HEAD))
    assert one_chunk(planner_of(), namespace="tenant").reason == "missing", "it is the model's, not the tenant's"
    put(tmp_path, collected)
    assert one_chunk(planner_of(), namespace="tenant").identity == collected
    assert one_chunk(planner_of(), namespace="other").reason == "missing"
    assert one_chunk(planner_of()).identity == identity_of(1, prefix=HEAD)


def test_a_chunk_of_another_model_is_other_model(planner_of, tmp_path):
    put(tmp_path, identity_of(1, model="another"))
    assert one_chunk(planner_of()).reason == "other_model"


def test_what_is_collected_is_found_by_the_request_that_has_the_same_head(planner_of, tmp_path):
    planner = planner_of()
    chunk = planner.chunk([*HEAD, *ids_of(1)], CollectParams(collect=len(HEAD)))
    assert chunk == ChunkIdentity(MODEL, HEAD, ids_of(1))
    put(tmp_path, chunk)
    assert one_chunk(planner).identity == chunk


def test_the_policy_is_the_requests_or_the_settings(planner_of):
    planner = planner_of(policy="auto")
    assert planner.policy(BlendParams()) is Policy.AUTO
    assert planner.policy(BlendParams(policy="full")) is Policy.FULL
    assert planner_of().policy(BlendParams()) is Policy.BLEND


DEFAULTS = {"selector": "query", "ratio": 0.4}


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, make_selector("query", 0.4)),
        ({"ratio": 0.1}, make_selector("query", 0.1)),
        ({"ratio": 0.0}, make_selector("query", 0.0)),
        ({"selector": "query"}, make_selector("query")),
        ({"selector": "none"}, make_selector("none")),
        ({"selector": "deviation", "ratio": 0.3}, make_selector("deviation", 0.3)),
        ({"selector": "chunk_head", "head_tokens": 3}, ChunkHeadSelector(3)),
        ({"selector": "deviation", "check_layers": (1, 3)}, make_selector("deviation", check_layers=(1, 3))),
        (
            {"selector": "chunk_head+query", "ratio": 0.2, "head_tokens": 5},
            make_selector("chunk_head+query", 0.2, 5),
        ),
        ({"selector": "query", "fidelity": "faithful"}, make_selector("query", 0.3)),
        ({"fidelity": "fast"}, make_selector(DEFAULTS["selector"], 0.05)),
        ({"rows": (4, 2)}, GivenRowsSelector.everywhere((4, 2))),
        ({"rows": ()}, GivenRowsSelector.everywhere(())),
        ({"rows": (4,), "selector": "query", "ratio": 0.1}, GivenRowsSelector.everywhere((4,))),
    ],
)
def test_what_a_request_says_of_its_rows_comes_before_the_settings(planner_of, asked, wanted):
    plan = laid_out(planner_of(**DEFAULTS), (ids_of(1), True), (QUESTION, False), **asked)
    assert plan.selector == wanted


def test_without_a_ratio_in_the_settings_the_selectors_own_holds(planner_of):
    plan = laid_out(planner_of(), (ids_of(1), True), (QUESTION, False))
    assert plan.selector == make_selector("query")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"selector": "best"}, "Selector 'best' is unknown"),
        ({"selector": "given"}, "Selector 'given' is unknown"),
        ({"selector": "none", "ratio": 0.5}, "takes no ratio"),
        ({"selector": "deviation", "check_layers": (LAYERS,)}, f"check layer {LAYERS} is beyond the model's {LAYERS}"),
        ({"selector": "chunk_head+deviation", "check_layers": (1, 9)}, "check layer 9 is beyond"),
        ({"selector": "deviation", "check_layers": (0,)}, "start at 0"),
        ({"selector": "deviation", "check_layers": (2, 1)}, "ascending"),
        ({"selector": "deviation", "check_layers": ()}, "ascending"),
    ],
)
def test_a_selector_that_would_fail_in_a_blend_is_refused_when_the_request_is_planned(planner_of, asked, named):
    planner = planner_of()
    with pytest.raises(BlendError, match=named):
        laid_out(planner, (ids_of(1), True), (QUESTION, False), **asked)


@pytest.mark.parametrize(
    "settings", [{"selector": "best"}, {"selector": "none", "ratio": 0.2}, {"selector": "given", "ratio": 0.2}]
)
def test_a_selector_of_the_settings_that_cannot_be_made_is_refused_at_start(planner_of, settings):
    with pytest.raises(BlendError, match="Selector"):
        planner_of(**settings)


def test_a_default_that_drops_rows_beyond_the_models_layers_is_refused_at_start(tmp_path):
    with pytest.raises(BlendError, match="beyond the model's 1 layers"):
        Planner(MODEL, ChunkDirectory(tmp_path, 1), ConnectorSettings(selector="deviation"), 1, LONGEST, None)


def test_counts_that_are_not_the_prompts_are_refused(planner_of):
    params = BlendParams(segments=segments_of([(4, True), (2, False)]))
    with pytest.raises(BlendError, match="count 6 tokens, but the prompt has 7"):
        planner_of().plan(range(7), params)
