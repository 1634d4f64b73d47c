"""A plan that is sent to the engine asks for the very chunks that it names."""

from __future__ import annotations

import pytest
from connector_samples import MODEL, identity_of, ids_of, put

from cacheblend.plan import BlendPlan, Policy, Segment, SegmentRole
from cacheblend.selectors import make_selector
from cacheblend.vllm_backend.directory import ChunkDirectory
from cacheblend.vllm_backend.planner import Planner
from cacheblend.vllm_backend.prompts import outgoing
from cacheblend.vllm_backend.request_format import parse_params
from cacheblend.vllm_backend.settings import ConnectorSettings

BOS, HEAD, QUESTION = 1, (1, 50, 51), (70, 71)
PRIMER = (*ids_of(5), *ids_of(6))


def planned_by_the_engine(folder, plan):
    """The plan that the engine makes of what is sent."""
    sent = outgoing(plan, Policy.BLEND, MODEL)
    planner = Planner(MODEL, ChunkDirectory(folder, 1), ConnectorSettings(), num_layers=4, max_model_len=4096, bos=BOS)
    return planner.plan(sent.token_ids, parse_params(sent.transfer))


def plan_over(*chunks, head=HEAD):
    segments = [Segment(SegmentRole.CHUNK, chunk.token_ids, chunk) for chunk in chunks]
    system = [Segment(SegmentRole.SYSTEM, head)] if head else []
    return BlendPlan((*system, *segments, Segment(SegmentRole.QUESTION, QUESTION)), make_selector("none"))


@pytest.mark.parametrize("head", [HEAD, ()])
@pytest.mark.parametrize("prefix", [HEAD, (BOS,), (), (*HEAD, *PRIMER), (BOS, *PRIMER), PRIMER])
def test_the_engine_finds_what_the_plan_names_whatever_it_was_encoded_behind(tmp_path, head, prefix):
    chunks = [identity_of(seed, prefix=prefix) for seed in (1, 2)]
    for chunk in chunks:
        put(tmp_path, chunk)
    assert planned_by_the_engine(tmp_path, plan_over(*chunks, head=head)).chunks == tuple(chunks)


def test_chunks_of_the_primer_itself_are_found_behind_the_head_beside_primed_ones(tmp_path):
    of_primer, primed = identity_of(5, prefix=HEAD), identity_of(1, prefix=(*HEAD, *PRIMER))
    put(tmp_path, of_primer)
    put(tmp_path, primed)
    assert planned_by_the_engine(tmp_path, plan_over(of_primer, primed)).chunks == (of_primer, primed)


def test_a_fresh_segment_that_begins_like_the_primer_is_not_taken_for_the_head(tmp_path):
    chunks = [identity_of(5, prefix=HEAD), identity_of(1, prefix=(*HEAD, *PRIMER)), identity_of(6, prefix=HEAD)]
    for chunk in chunks[1:]:
        put(tmp_path, chunk)
    segments = [Segment(SegmentRole.SYSTEM, HEAD), Segment(SegmentRole.CHUNK, chunks[0].token_ids)]
    segments += [Segment(SegmentRole.CHUNK, chunk.token_ids, chunk) for chunk in chunks[1:]]
    plan = BlendPlan((*segments, Segment(SegmentRole.QUESTION, QUESTION)), make_selector("none"))
    assert planned_by_the_engine(tmp_path, plan).chunks == tuple(chunks[1:])


def test_a_chunk_that_is_only_there_without_the_primer_is_used_so(tmp_path):
    put(tmp_path, identity_of(1, prefix=HEAD))
    plan = planned_by_the_engine(tmp_path, plan_over(identity_of(1, prefix=(*HEAD, *PRIMER))))
    assert plan.chunks == (identity_of(1, prefix=HEAD),)
