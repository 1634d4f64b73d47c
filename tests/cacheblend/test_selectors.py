"""Which rows each selector picks, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
import torch
from cacheblend_samples import candidates_of, identity_of, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.selectors import SELECTOR_NAMES, Candidates, Evidence, make_selector, selector_params
from cacheblend.selectors.base import top_rows
from cacheblend.selectors.chunk_head import ChunkHeadSelector
from cacheblend.selectors.composed import HeadsThenSelector
from cacheblend.selectors.deviation import DeviationSelector
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.selectors.query import QuerySelector
from cacheblend.selectors.selection import RowSelection


def chosen(selector, candidates, share=None):
    mask = selector.choose(candidates, selector.share if share is None else share)
    assert mask.dtype is torch.bool
    assert mask.shape == candidates.positions.shape
    return candidates.positions[mask].tolist()


def test_candidates_are_every_reusable_row_with_its_place_in_its_chunk():
    plan = plan_of([identity_of(1, 3), identity_of(2, 2)], make_selector("query"), system=(5, 6))
    rows = Candidates.of_plan(plan)
    assert rows.positions.tolist() == [2, 3, 4, 5, 6]
    assert rows.offsets.tolist() == [0, 1, 2, 0, 1]
    assert rows.chunk_lengths.tolist() == [3, 3, 3, 2, 2]
    assert rows.total == 5
    assert rows.scores is None


def test_candidates_of_a_plan_without_reuse_are_empty():
    rows = Candidates.of_plan(plan_of([]))
    assert rows.positions.tolist() == []
    assert rows.positions.dtype is torch.int64


def test_a_selector_that_recomputes_nothing_has_no_candidates():
    rows = Candidates.of_plan(plan_of([identity_of(1, 3)], make_selector("none")))
    assert rows.positions.tolist() == []
    assert rows.total == 3


def test_a_selector_that_recomputes_nothing_computes_the_fresh_rows_alone():
    plan = plan_of([identity_of(1, 3)], make_selector("none"), system=(5, 6))
    selection = RowSelection(plan, 4, torch.device("cpu"), torch.arange(2))
    selection.count_layers(4)
    assert (selection.rows, selection.ratio, selection.positions.tolist()) == ((), 0.0, [0, 1])
    assert selection.layer_rows == ((0, ()),)


SYSTEM = (5, 6)
EXACT, MOVED = identity_of(1, 3, prefix=SYSTEM), identity_of(2, 2, prefix=SYSTEM)


@pytest.mark.parametrize("name", [name for name in SELECTOR_NAMES if name not in ("full", "none")])
def test_a_chunk_behind_the_very_tokens_it_was_encoded_behind_is_no_candidate(name):
    rows = Candidates.of_plan(plan_of([EXACT, MOVED, EXACT], make_selector(name), system=SYSTEM))
    assert rows.positions.tolist() == [5, 6, 7, 8, 9], "the same chunk further on is one"
    assert rows.offsets.tolist() == [0, 1, 0, 1, 2]
    assert rows.total == 8, "a ratio is a share of all reusable rows"
    assert rows.budget(0.5) == 4


@pytest.mark.parametrize("head", [(), (5,), (6, 5), (5, 6, 7)])
def test_a_chunk_behind_other_tokens_is_a_candidate(head):
    rows = Candidates.of_plan(plan_of([EXACT], make_selector("query"), system=head))
    assert rows.positions.tolist() == list(range(len(head), len(head) + 3))


@pytest.mark.parametrize(
    "selector", [make_selector("full"), make_selector("query", 1.0), GivenRowsSelector.everywhere((2, 4))]
)
def test_every_reusable_row_is_a_candidate_where_all_are_recomputed_or_rows_are_given(selector):
    rows = Candidates.of_plan(plan_of([EXACT, MOVED], selector, system=SYSTEM))
    assert rows.positions.tolist() == [2, 3, 4, 5, 6]


def test_what_a_user_has_put_there_is_a_candidate_wherever_it_stands():
    plan = replace(plan_of([EXACT, MOVED], make_selector("query"), system=SYSTEM), stored_by_us=False)
    assert Candidates.of_plan(plan).positions.tolist() == [2, 3, 4, 5, 6]


def test_a_prompt_of_one_exact_chunk_recomputes_nothing():
    plan = plan_of([EXACT], make_selector("query", 0.5), system=SYSTEM)
    selection = RowSelection(plan, 4, torch.device("cpu"), torch.arange(2), torch.rand(5))
    selection.count_layers(4)
    assert (selection.rows, selection.ratio, selection.positions.tolist()) == ((), 0.0, [0, 1])


def test_none_picks_no_row_and_full_picks_every_row():
    rows = candidates_of([3, 2])
    assert chosen(make_selector("none"), rows) == []
    assert chosen(make_selector("full"), rows) == [0, 1, 2, 3, 4]


def test_chunk_head_picks_the_first_rows_of_every_chunk():
    rows = candidates_of([4, 1, 3], start=10)
    assert chosen(ChunkHeadSelector(2), rows) == [10, 11, 14, 15, 16]
    assert chosen(ChunkHeadSelector(0), rows) == []
    assert chosen(ChunkHeadSelector(99), rows) == list(range(10, 18))


def test_chunk_head_by_ratio_picks_a_share_of_each_chunk_rounded_up():
    rows = candidates_of([10, 4, 1])
    assert chosen(ChunkHeadSelector(ratio=0.25), rows) == [0, 1, 2, 10, 14]
    assert chosen(ChunkHeadSelector(ratio=1.0), rows) == list(range(15))
    assert chosen(ChunkHeadSelector(ratio=0.0), rows) == []


@pytest.mark.parametrize("percent", [1, 5, 7, 10, 15, 20, 29, 30, 35, 45, 55, 57, 70, 90])
def test_chunk_head_by_ratio_never_picks_a_row_more_because_of_rounding(percent):
    """0.15 of 100 rows are 15, though 0.15 as a float is a little more than that."""
    selector = ChunkHeadSelector(ratio=percent / 100)
    for length in (20, 100, 200, 300, 500, 1100):
        exact = ceil(Fraction(percent, 100) * length)
        assert len(chosen(selector, candidates_of([length]))) == exact
        assert selector.expected_rows([length]) == exact


def test_query_picks_the_highest_scores_and_ties_go_to_the_earlier_row():
    rows = candidates_of([6], [0.5, 0.9, 0.5, 0.1, 0.5, 0.9])
    assert chosen(QuerySelector(1 / 6), rows) == [1]
    assert chosen(QuerySelector(2 / 6), rows) == [1, 5]
    assert chosen(QuerySelector(4 / 6), rows) == [0, 1, 2, 5]
    assert chosen(QuerySelector(1.0), rows) == [0, 1, 2, 3, 4, 5]


def test_a_share_is_of_the_whole_plan_even_when_fewer_rows_are_left():
    rows = candidates_of([10], [float(i) for i in range(10)])
    left = rows.take(torch.arange(4))
    assert chosen(QuerySelector(0.3), left) == [1, 2, 3]
    assert chosen(QuerySelector(0.9), left) == [0, 1, 2, 3]


def test_deviation_drops_rows_at_its_check_layers():
    assert DeviationSelector(0.2).shares(4) == ((1, 0.2),)
    first, second, third = DeviationSelector(0.2, (1, 2, 5), widen=2.0).shares(8)
    assert first == (1, pytest.approx(0.4))
    assert second == (2, pytest.approx(0.3))
    assert third == (5, pytest.approx(0.2))


def test_gradual_filtering_never_keeps_more_than_everything():
    shares = DeviationSelector(0.8, (1, 2), widen=2.0).shares(4)
    assert [share for _, share in shares] == [1.0, pytest.approx(0.8)]


def test_deviation_keeps_fewer_rows_from_check_layer_to_check_layer():
    selector = DeviationSelector(0.2, (1, 2), widen=2.0)
    rows = candidates_of([10], [float(i % 7) for i in range(10)])
    kept = []
    for _, share in selector.shares(4):
        rows = rows.take(selector.choose(rows, share))
        kept.append(rows.positions.tolist())
    assert [len(rows) for rows in kept] == [4, 2]
    assert set(kept[1]) < set(kept[0])


def test_composed_budget_counts_the_heads():
    rows = candidates_of([5, 5], [0, 0, 0, 9, 1, 0, 8, 7, 0, 0])
    selector = HeadsThenSelector(ChunkHeadSelector(1), QuerySelector(0.4))
    assert chosen(selector, rows) == [0, 3, 5, 6]


def test_composed_keeps_all_heads_where_they_alone_exceed_the_budget():
    rows = candidates_of([5, 5], range(10))
    selector = HeadsThenSelector(ChunkHeadSelector(3), QuerySelector(0.2))
    assert chosen(selector, rows) == [0, 1, 2, 5, 6, 7]
    assert selector.expected_rows([5, 5]) == 6


def test_composed_never_spends_its_budget_on_a_head_twice():
    """Heads with the highest scores of all leave their place in the budget to the next ones."""
    rows = candidates_of([4, 4], [9, 1, 2, 3, 9, 4, 5, 6])
    assert chosen(HeadsThenSelector(ChunkHeadSelector(1), QuerySelector(0.5)), rows) == [0, 4, 6, 7]


def test_composed_with_deviation_narrows_at_its_check_layers():
    selector = make_selector("chunk_head+deviation", 0.3, 2)
    assert selector.evidence is Evidence.DEVIATION
    assert selector.shares(4) == ((1, 0.3),)
    assert make_selector("chunk_head+query").evidence is Evidence.ATTENTION


@pytest.mark.parametrize("name", SELECTOR_NAMES)
def test_expected_rows_are_the_rows_chosen(name):
    lengths = [40, 20, 100]
    selector = make_selector(name)
    rows = candidates_of(lengths, range(160))
    assert selector.expected_rows(lengths) == len(chosen(selector, rows))


def test_a_spec_names_everything_that_changes_the_choice():
    specs = [
        make_selector("none").spec,
        make_selector("full").spec,
        ChunkHeadSelector(8).spec,
        ChunkHeadSelector(16).spec,
        ChunkHeadSelector(ratio=0.1).spec,
        QuerySelector(0.1).spec,
        QuerySelector(0.2).spec,
        DeviationSelector(0.1).spec,
        DeviationSelector(0.2).spec,
        DeviationSelector(0.1, (2,)).spec,
        DeviationSelector(0.1, (1, 2)).spec,
        DeviationSelector(0.1, (1, 2), 2.0).spec,
        make_selector("chunk_head+query", 0.1).spec,
        make_selector("chunk_head+query", 0.1, 4).spec,
        make_selector("chunk_head+deviation", 0.1).spec,
    ]
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: make_selector("nearest"), "nearest"),
        (lambda: make_selector("query", 1.5), "1.5"),
        (lambda: make_selector("query", -0.1), "-0.1"),
        (lambda: make_selector("query", float("nan")), "nan"),
        (lambda: make_selector("deviation", 2.0), "2.0"),
        (lambda: make_selector("chunk_head", 1.1), "1.1"),
        (lambda: make_selector("chunk_head", 7.0, 16), "7.0"),
        (lambda: make_selector("chunk_head", head_tokens=-1), "-1"),
        (lambda: make_selector("chunk_head+query", head_tokens=-2), "-2"),
        (lambda: make_selector("none", 0.5), "0.5"),
        (lambda: make_selector("full", 0.5), "0.5"),
        (lambda: DeviationSelector(0.1, ()), r"\(\)"),
        (lambda: DeviationSelector(0.1, (2, 1)), r"\(2, 1\)"),
        (lambda: DeviationSelector(0.1, (1, 1)), r"\(1, 1\)"),
        (lambda: DeviationSelector(0.1, (0,)), "0"),
        (lambda: DeviationSelector(0.1, (1, 2), 0.5), "0.5"),
        (lambda: DeviationSelector(0.1, (4,)).shares(4), "4"),
    ],
)
def test_a_bad_parameter_is_refused_in_a_sentence_that_names_it(make, value):
    with pytest.raises(BlendError, match=value) as caught:
        make()
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_ratio_that_none_or_full_imply_is_accepted():
    assert make_selector("none", 0.0).spec == "none"
    assert make_selector("full", 1.0).spec == "full"


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=5)
RATIOS = st.floats(0.0, 1.0)
SCORED = ("query", "deviation")


def scored_candidates(data, lengths):
    count = sum(lengths)
    scores = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), min_size=count, max_size=count))
    return candidates_of(lengths, scores)


EVERYTHING = [
    make_selector("full"),
    *(make_selector(name, 1.0) for name in SELECTOR_NAMES if name not in ("none", "full")),
    make_selector("query", 1),
    DeviationSelector(1.0, (1, 2, 5), widen=3.0),
    ChunkHeadSelector(tokens=0, ratio=1.0),
]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), selector=st.sampled_from(EVERYTHING))
def test_what_recomputes_everything_chooses_every_row_at_each_of_its_shares_whatever_the_scores(data, selector):
    lengths = data.draw(LENGTHS)
    rows = scored_candidates(data, lengths)
    assert selector.recomputes_everything
    for _, share in selector.shares(8):
        assert selector.choose(rows, share).all()
    assert selector.expected_rows(lengths) == sum(lengths)
    assert not any(selector.needs(evidence) for evidence in (Evidence.ATTENTION, Evidence.DEVIATION))


@pytest.mark.parametrize(
    "selector",
    [
        *(make_selector(name) for name in SELECTOR_NAMES if name != "full"),
        make_selector("query", 0.9999),
        DeviationSelector(0.7, (1, 2), widen=2.0),
        ChunkHeadSelector(tokens=1000),
        HeadsThenSelector(ChunkHeadSelector(1000), QuerySelector(0.2)),
        HeadsThenSelector(ChunkHeadSelector(ratio=1.0), DeviationSelector(0.2)),
        GivenRowsSelector.everywhere(range(1000)),
    ],
    ids=lambda selector: selector.spec,
)
def test_what_may_choose_all_rows_of_a_plan_but_does_not_promise_it_needs_its_evidence(selector):
    assert not selector.recomputes_everything
    assert [evidence for evidence in Evidence if selector.needs(evidence)] == [selector.evidence]


@pytest.mark.parametrize("selector", EVERYTHING, ids=lambda selector: selector.spec)
def test_a_selection_of_everything_has_all_rows_in_every_layer_without_a_score(selector):
    plan = plan_of([identity_of(1, 4), identity_of(2, 3)], selector, system=(5, 6))
    selection = RowSelection(plan, 6, torch.device("cpu"), torch.arange(2), start=4)
    assert not any(selection.drops_at(layer) for layer in range(6))
    selection.count_layers(6)
    assert selection.positions.tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert (selection.rows, selection.layer_rows) == (tuple(range(2, 9)), ((0, tuple(range(2, 9))),))
    assert selection.ratio == 1.0


def test_a_selection_of_everything_still_refuses_check_layers_that_the_model_does_not_have():
    plan = plan_of([identity_of(1, 4)], DeviationSelector(1.0, (9,)))
    with pytest.raises(BlendError, match="beyond the model's 4 layers"):
        RowSelection(plan, 4, torch.device("cpu"), torch.arange(0))


@st.composite
def prompts(draw):
    """Lengths of a prompt's segments before the question, and whether each is reused; at least one is."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    reused = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)).filter(any))
    return list(zip(lengths, reused, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    prompt=prompts(),
    ratio=st.floats(0.0, 1.0, exclude_max=True),
    check_layers=st.sampled_from([(1,), (1, 2, 4)]),
    heads=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_narrowing_keeps_fresh_rows_and_of_the_others_those_that_deviate_most(prompt, ratio, check_layers, heads, data):
    if heads is None:
        selector = make_selector("deviation", ratio, check_layers=check_layers)
    else:
        selector = make_selector("chunk_head+deviation", ratio, heads, check_layers)
    segments, offsets, fresh, at = [], {}, [], 0
    for seed, (length, reused) in enumerate(prompt):
        identity = identity_of(seed, length)
        segments.append(Segment(SegmentRole.CHUNK, identity.token_ids, identity if reused else None))
        rows = range(at, at + length)
        if reused:
            offsets.update(zip(rows, range(length), strict=True))
        else:
            fresh += rows
        at += length
    # One at the very beginning is what full prefill computes, and no candidate.
    chosen_before = [row for row in offsets if not (prompt[0][1] and row < prompt[0][0])]
    plan = BlendPlan((*segments, Segment(SegmentRole.QUESTION, (7, 8))), selector)
    start = data.draw(st.integers(0, min(offsets)))
    fresh = [row for row in fresh if row >= start]
    selection = RowSelection(plan, 6, torch.device("cpu"), torch.tensor(fresh, dtype=torch.int64), start=start)
    before = sorted(fresh + chosen_before)
    assert selection.positions.tolist() == before
    account = [(0, tuple(chosen_before))]
    for layer, share in selector.shares(6):
        assert selection.needs_deviation_at(layer)
        deviation = data.draw(
            st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=len(before), max_size=len(before))
        )
        of_row = dict(zip(before, deviation, strict=True))
        ranked = sorted(chosen_before, key=lambda row: (heads is None or offsets[row] >= heads, -of_row[row], row))
        always = sum(heads is not None and offsets[row] < heads for row in chosen_before)
        count = max(always, min(len(chosen_before), round(share * len(offsets))))
        keep = selection.narrow(layer, torch.tensor(deviation))
        chosen_before = sorted(ranked[:count])
        after = sorted(fresh + chosen_before)
        assert keep.dtype is torch.bool
        assert [row for row, goes_on in zip(before, keep.tolist(), strict=True) if goes_on] == after
        assert selection.positions.dtype is torch.int64
        assert selection.positions.tolist() == after
        assert selection.chosen.tolist() == chosen_before
        account.append((layer, tuple(chosen_before)))
        before = after
    assert selection.layer_rows == tuple(account)
    assert [layer for layer in range(6) if selection.drops_at(layer)] == list(check_layers)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=LENGTHS, ratio=RATIOS, name=st.sampled_from(SCORED))
def test_scored_selectors_pick_exactly_their_budget_and_the_same_rows_every_time(data, lengths, ratio, name):
    rows = scored_candidates(data, lengths)
    selector = make_selector(name, ratio)
    picked = chosen(selector, rows)
    assert len(picked) == round(ratio * sum(lengths)) == selector.expected_rows(lengths)
    assert picked == chosen(selector, rows)
    assert picked == sorted(picked)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=LENGTHS, ratio=RATIOS, heads=st.integers(0, 5), name=st.sampled_from(SCORED))
def test_composed_selectors_pick_their_budget_or_the_heads_alone(data, lengths, ratio, heads, name):
    rows = scored_candidates(data, lengths)
    picked = chosen(make_selector(f"chunk_head+{name}", ratio, heads), rows)
    head_rows = chosen(ChunkHeadSelector(heads), rows)
    assert set(head_rows) <= set(picked)
    assert len(picked) == max(len(head_rows), round(ratio * sum(lengths)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=LENGTHS, ratios=st.tuples(RATIOS, RATIOS))
def test_a_larger_ratio_keeps_every_row_of_a_smaller_one(data, lengths, ratios):
    small, large = sorted(ratios)
    rows = scored_candidates(data, lengths)
    for make in (
        QuerySelector,
        DeviationSelector,
        lambda ratio: ChunkHeadSelector(ratio=ratio),
        lambda ratio: make_selector("chunk_head+query", ratio, 2),
    ):
        assert set(chosen(make(small), rows)) <= set(chosen(make(large), rows))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ratio=RATIOS)
def test_chunk_head_by_ratio_picks_heads_only_and_never_less_than_its_share(lengths, ratio):
    rows = candidates_of(lengths)
    picked = chosen(ChunkHeadSelector(ratio=ratio), rows)
    start = 0
    for length in lengths:
        inside = [row - start for row in picked if start <= row < start + length]
        assert inside == list(range(len(inside)))
        assert ratio * length - 1e-5 <= len(inside) <= ratio * length + 1
        start += length


@pytest.mark.parametrize(
    "selector",
    [
        *(make_selector(name) for name in SELECTOR_NAMES),
        make_selector("chunk_head", 0.3),
        make_selector("chunk_head", None, 5),
        make_selector("query", 0.4),
        make_selector("deviation", 0.2, None, (1, 3)),
        make_selector("chunk_head+query", 0.4, 7),
        make_selector("chunk_head+deviation", 0.4, 7, (2,)),
    ],
    ids=lambda selector: selector.spec,
)
def test_a_selector_comes_back_from_its_parameters_as_it_was(selector):
    assert make_selector(**selector_params(selector)) == selector


def test_given_rows_travel_as_rows():
    assert selector_params(GivenRowsSelector.everywhere((3, 9))) == {"rows": (3, 9)}


@pytest.mark.parametrize(
    "selector",
    [
        DeviationSelector(0.2, (1, 2), widen=3.0),
        ChunkHeadSelector(tokens=5, ratio=0.2),
        HeadsThenSelector(ChunkHeadSelector(ratio=0.1), QuerySelector(0.2)),
        GivenRowsSelector(((0, (1, 2)), (1, (1,)))),
    ],
    ids=lambda selector: selector.spec,
)
def test_a_selector_that_cannot_travel_is_refused_and_not_sent_as_another_one(selector):
    with pytest.raises(BlendError, match="cannot travel"):
        selector_params(selector)


@given(
    scores=st.lists(st.sampled_from([float("-inf"), -1.0, 0.0, 0.5, 2.0, float("nan")]), max_size=40), data=st.data()
)
def test_the_highest_scores_are_marked_and_equal_ones_from_the_earliest_row_on(scores, data):
    count = data.draw(st.integers(0, len(scores)))
    tensor = torch.tensor(scores, dtype=torch.float32)
    in_order = torch.sort(tensor, descending=True, stable=True).indices[:count]
    assert top_rows(tensor, count).nonzero().flatten().tolist() == sorted(in_order.tolist())
