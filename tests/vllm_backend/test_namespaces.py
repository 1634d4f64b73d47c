"""Blended KV is found by the requests it is right for, and by no others."""

from __future__ import annotations

import hashlib

import pytest
import torch
from connector_samples import identity_of, ids_of, plan_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheblend.selectors import Candidates, make_selector
from cacheblend.selectors.base import Evidence
from cacheblend.selectors.deviation import DeviationSelector
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.selectors.query import QuerySelector
from cacheblend.vllm_backend.namespaces import NAMESPACES_KEPT, Namespaces, enter, leave

BLOCK = 4

SELECTORS = [
    make_selector("none"),
    make_selector("full"),
    make_selector("chunk_head", head_tokens=1),
    make_selector("chunk_head", head_tokens=2),
    make_selector("chunk_head", 0.5),
    make_selector("deviation", 0.25),
    make_selector("deviation", 0.5),
    make_selector("deviation", 0.25, check_layers=(2,)),
    make_selector("deviation", 0.25, check_layers=(1, 2)),
    DeviationSelector(0.25, (1, 2), widen=2.0),
    make_selector("deviation", 1.0),
    make_selector("query", 0.25),
    make_selector("query", 0.999),
    make_selector("query", 1.0),
    make_selector("chunk_head+query", 0.25, 1),
    make_selector("chunk_head+query", 0.25, 2),
    make_selector("chunk_head+query", 1.0, 1),
    make_selector("chunk_head+deviation", 0.25, 1),
    GivenRowsSelector.everywhere((0, 1)),
    GivenRowsSelector.everywhere((0, 2)),
    GivenRowsSelector(((0, (0, 1)), (1, (0,)))),
    GivenRowsSelector(((0, (0, 1)), (1, (1,)))),
    GivenRowsSelector(((0, (0, 1)), (2, (0,)))),
]
CHUNKS = [
    identity_of(1),
    identity_of(2),
    identity_of(1, tokens=5),
    identity_of(1, prefix=(1,)),
    identity_of(1, prefix=(2,)),
    identity_of(1, model="model.namespace"),
]
PARTS = st.one_of(st.sampled_from(CHUNKS), st.sampled_from([ids_of(1), ids_of(2), ids_of(1, 5), ids_of(1, 3)]))
QUESTIONS = st.sampled_from([(7, 8, 9), (7, 8), (7, 8, 10)])


@st.composite
def described(draw):
    """All that a plan is made of: (parts with one that is reused, selector, question)."""
    parts = draw(st.lists(PARTS, max_size=3))
    parts.insert(draw(st.integers(0, len(parts))), draw(st.sampled_from(CHUNKS)))
    return parts, draw(st.sampled_from(SELECTORS)), draw(QUESTIONS)


@st.composite
def neighbours(draw):
    """Two descriptions that differ in one thing, or in none."""
    parts, selector, question = draw(described())
    parts_too, changed = list(parts), draw(st.sampled_from(["part", "order", "selector", "question"]))
    if changed == "part":
        parts_too[draw(st.integers(0, len(parts) - 1))] = draw(PARTS)
        if not any(part in CHUNKS for part in parts_too):
            parts_too.append(CHUNKS[0])
    if changed == "order":
        parts_too = draw(st.permutations(parts))
    other_selector = draw(st.sampled_from(SELECTORS)) if changed == "selector" else selector
    other_question = draw(QUESTIONS) if changed == "question" else question
    return (parts, selector, question), (parts_too, other_selector, other_question)


def asks_the_question(selector):
    """Where every row is recomputed there is no choice that could depend on it."""
    return selector.evidence is Evidence.ATTENTION and selector.share < 1


def what_the_kv_depends_on(description):
    parts, selector, question = description
    return parts, selector, question if asks_the_question(selector) else None


@settings(max_examples=300, deadline=None)
@given(st.one_of(neighbours(), st.tuples(described(), described())))
def test_plans_share_a_namespace_exactly_when_their_blended_kv_is_the_same(pair):
    first, second = pair
    namespaces = Namespaces()
    shared = namespaces.of(plan_of(*first)) is namespaces.of(plan_of(*second))
    assert shared == (what_the_kv_depends_on(first) == what_the_kv_depends_on(second))


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.spec)
def test_the_question_matters_only_to_selectors_that_ask_it(selector):
    namespaces = Namespaces()
    one, other = (namespaces.of(plan_of([CHUNKS[0]], selector, question)) for question in [(7, 8), (7, 9)])
    assert (one is other) == (not asks_the_question(selector))


@pytest.mark.parametrize("make", [QuerySelector, DeviationSelector])
def test_ratios_that_choose_other_rows_never_share_a_namespace(make):
    """0.15 of ten rows are two, a millionth of a percent less is one."""
    chunk = identity_of(1, tokens=10, prefix=(1,))
    plans = [plan_of([chunk], make(ratio)) for ratio in (0.15, 0.14999999)]
    chosen = {
        int(plan.selector.choose(Candidates.of_plan(plan).scored(torch.arange(10.0)), plan.selector.share).sum())
        for plan in plans
    }
    assert chosen == {1, 2}
    namespaces = Namespaces()
    assert namespaces.of(plans[0]) is not namespaces.of(plans[1])


def test_a_reason_for_fresh_rows_does_not_keep_plans_apart():
    """The KV is that of the rows, whatever the story of how they came to be fresh."""
    told = plan_of(CHUNKS[:2], SELECTORS[0]).with_fresh({CHUNKS[1].key: "evicted"})
    untold = plan_of([CHUNKS[0], CHUNKS[1].token_ids], SELECTORS[0])
    namespaces = Namespaces()
    assert namespaces.of(told) is namespaces.of(untold)


def test_two_engines_never_use_one_salt_for_the_same_plan():
    plan = plan_of(CHUNKS[:1], SELECTORS[0])
    assert Namespaces().of(plan).salt != Namespaces().of(plan).salt


class HashingRequest:
    """Hashes its full blocks as vLLM's requests do: each chained to the one before, the first to the salt."""

    def __init__(self, token_ids, cache_salt=None):
        self.token_ids = list(token_ids)
        self.cache_salt = cache_salt
        self.block_hashes: list[bytes] = []
        self.update_block_hashes()

    def update_block_hashes(self):
        for start in range(len(self.block_hashes) * BLOCK, len(self.token_ids) - BLOCK + 1, BLOCK):
            before = self.block_hashes[-1] if self.block_hashes else ("start", self.cache_salt)
            block = (before, self.token_ids[start : start + BLOCK])
            self.block_hashes.append(hashlib.sha256(repr(block).encode()).digest())

    def decode(self, token_ids):
        self.token_ids.extend(token_ids)
        self.update_block_hashes()


def any_namespace(seed=1, told_tokens=4):
    """Of a plan whose KV depends on so many ids at the prompt's start."""
    return Namespaces().of(plan_of([identity_of(seed, told_tokens)], SELECTORS[0]))


SALTS = st.sampled_from([None, "tenant"])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(0, 6), st.data(), SALTS)
def test_leaving_gives_a_request_its_own_hashes_back(tokens, exact_blocks, data, salt):
    request, untouched = HashingRequest(range(tokens), salt), HashingRequest(range(tokens), salt)
    enter(request, any_namespace(told_tokens=data.draw(st.integers(1, tokens))), exact_blocks, BLOCK)
    leave(request, salt)
    for one in (request, untouched):
        one.decode(range(10))
    assert request.cache_salt == salt
    assert request.block_hashes == untouched.block_hashes


@settings(max_examples=100, deadline=None)
@given(st.integers(BLOCK, 24), st.data(), SALTS)
def test_exact_blocks_at_the_head_keep_their_hashes_and_the_others_do_not(tokens, data, salt):
    exact_blocks = data.draw(st.integers(0, tokens // BLOCK - 1))
    plain, request = HashingRequest(range(tokens), salt), HashingRequest(range(tokens), salt)
    enter(request, any_namespace(told_tokens=data.draw(st.integers(1, tokens))), exact_blocks, BLOCK)
    assert len(request.block_hashes) == len(plain.block_hashes)
    assert request.block_hashes[:exact_blocks] == plain.block_hashes[:exact_blocks]
    assert set(request.block_hashes[exact_blocks:]).isdisjoint(plain.block_hashes)


@settings(max_examples=200, deadline=None)
@example(tokens=6, first_reused=4, told_tokens=5, decoded=2)
@example(tokens=3, first_reused=0, told_tokens=1, decoded=1)
@given(st.integers(1, 24), st.integers(0, 23), st.integers(1, 24), st.integers(0, 12))
def test_no_block_from_the_first_reused_row_on_is_ever_found_as_an_exact_one(
    tokens, first_reused, told_tokens, decoded
):
    """Also a block that the prompt leaves unfilled, and the answer fills."""
    first_reused = min(first_reused, tokens - 1)
    plain, request = HashingRequest(range(tokens)), HashingRequest(range(tokens))
    enter(request, any_namespace(told_tokens=min(told_tokens, tokens)), first_reused // BLOCK, BLOCK)
    for one in (plain, request):
        one.decode(range(100, 100 + decoded))
    assert len(request.block_hashes) == len(plain.block_hashes)
    assert set(request.block_hashes[first_reused // BLOCK :]).isdisjoint(plain.block_hashes)


def test_with_no_exact_block_every_hash_is_the_namespaces():
    plain, request = HashingRequest(range(12)), HashingRequest(range(12))
    enter(request, any_namespace(), 0, BLOCK)
    assert len(request.block_hashes) == 3
    assert set(request.block_hashes).isdisjoint(plain.block_hashes)


def test_requests_of_one_namespace_find_one_anothers_blocks_and_those_of_two_do_not():
    namespace, other = any_namespace(1), any_namespace(2)
    requests = [HashingRequest(range(12)) for _ in range(3)]
    for request, where in zip(requests, (namespace, namespace, other), strict=True):
        enter(request, where, 1, BLOCK)
    first, second, apart = (request.block_hashes for request in requests)
    assert first == second
    assert first[0] == apart[0]
    assert set(first[1:]).isdisjoint(apart)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 24), st.data())
def test_requests_of_one_namespace_share_blocks_exactly_as_far_as_their_ids_are_the_same(told_tokens, data):
    """What the plan tells they have in common; what follows it (a question, an answer) may differ."""
    namespace = any_namespace(told_tokens=told_tokens)
    tails = [data.draw(st.lists(st.integers(0, 1), max_size=9)) for _ in range(2)]
    one, other = (HashingRequest([*range(100, 100 + told_tokens), *tail]) for tail in tails)
    for request in (one, other):
        enter(request, namespace, 0, BLOCK)
    for end in range(BLOCK, min(len(one.token_ids), len(other.token_ids)) + 1, BLOCK):
        found = one.block_hashes[end // BLOCK - 1] == other.block_hashes[end // BLOCK - 1]
        assert found == (one.token_ids[:end] == other.token_ids[:end])
    for request in (one, other):
        assert len(set(request.block_hashes)) == len(request.block_hashes) == len(request.token_ids) // BLOCK


@pytest.mark.parametrize(
    "selector", [make_selector("none"), make_selector("query", 0.25), make_selector("query", 1.0)], ids=lambda s: s.spec
)
def test_a_namespace_tells_the_question_only_where_the_choice_of_rows_depends_on_it(selector):
    plan = plan_of([CHUNKS[0]], selector)
    told = plan.length if asks_the_question(selector) else plan.question.start
    assert Namespaces().of(plan).told_tokens == told


def test_requests_with_salts_of_their_own_stay_apart_in_one_namespace():
    namespace = any_namespace()
    one, other = HashingRequest(range(12), "a"), HashingRequest(range(12), "b")
    for request in (one, other):
        enter(request, namespace, 1, BLOCK)
    assert set(one.block_hashes).isdisjoint(other.block_hashes)


def test_blocks_of_a_dropped_namespace_are_never_found_again():
    namespaces, plan = Namespaces(), plan_of(CHUNKS[:1], SELECTORS[0])
    dropped = namespaces.of(plan)
    namespaces.drop(dropped)
    again = namespaces.of(plan)
    assert again.plan_digest == dropped.plan_digest
    assert again.salt != dropped.salt
    namespaces.drop(dropped)
    assert namespaces.of(plan) is again, "dropping the old one twice leaves the new one"


def test_only_the_namespaces_used_last_are_kept():
    namespaces = Namespaces()
    plans = [plan_of([identity_of(seed, tokens=1)], SELECTORS[0]) for seed in range(NAMESPACES_KEPT + 1)]
    first, second = namespaces.of(plans[0]), namespaces.of(plans[1])
    for plan in plans[2:NAMESPACES_KEPT]:
        namespaces.of(plan)
    assert namespaces.of(plans[0]) is first, "all fit"
    namespaces.of(plans[NAMESPACES_KEPT])
    assert namespaces.of(plans[0]) is first, "it was used since"
    assert namespaces.of(plans[1]) is not second
    assert len(namespaces._by_digest) == NAMESPACES_KEPT
