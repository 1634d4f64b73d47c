"""Rows decided elsewhere: a blend replayed from its rows is the blend itself."""

from __future__ import annotations

import pytest
import torch
from cacheblend_samples import identity_of, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.selectors import Candidates, make_selector
from cacheblend.selectors.base import Evidence, members
from cacheblend.selectors.deviation import DeviationSelector
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.selectors.selection import RowSelection
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore

CPU = torch.device("cpu")
LAYERS = 4
SYSTEM = (5, 6)
CHUNKS = [identity_of(1, 4), identity_of(2, 3)]
REUSED = (2, 3, 4, 5, 6, 7, 8)
"""Positions of the chunks behind the system prompt."""


def selection_of(selector, start=0) -> RowSelection:
    plan = plan_of(CHUNKS, selector, system=SYSTEM)
    return RowSelection(plan, LAYERS, CPU, torch.arange(min(start, len(SYSTEM)), len(SYSTEM)), start=start)


@pytest.mark.parametrize("layers", [(), ((1, (3,)),), ((0, (3,)), (0, (3,))), ((0, (3,)), (2, (3,)), (1, (3,)))])
def test_layers_that_do_not_ascend_from_zero_are_refused_with_their_numbers(layers):
    with pytest.raises(BlendError, match="ascend from 0") as raised:
        GivenRowsSelector(layers)
    assert str([layer for layer, _ in layers]) in str(raised.value)


def test_it_needs_no_evidence_and_chooses_the_rows_of_layer_0_among_the_reusable_ones():
    selector = GivenRowsSelector(((0, (8, 3, 1, 99)), (2, (3,))))
    candidates = Candidates.of_plan(plan_of(CHUNKS, selector, system=SYSTEM))
    assert selector.evidence is Evidence.NOTHING
    assert candidates.positions[selector.choose(candidates, selector.share)].tolist() == [3, 8]
    assert [selector.rows_from(layer) for layer in range(4)] == [(8, 3, 1, 99), None, (3,), None]


def test_everywhere_is_the_same_rows_in_every_layer():
    selector = GivenRowsSelector.everywhere([3, 8])
    assert selector == GivenRowsSelector(((0, (3, 8)),))
    assert selector.expected_rows([4, 3]) == 2
    selection = selection_of(selector)
    assert not any(selection.drops_at(layer) for layer in range(LAYERS))
    assert selection.positions.tolist() == [0, 1, 3, 8]


def test_no_rows_at_all_can_be_given():
    assert selection_of(GivenRowsSelector.everywhere(())).positions.tolist() == [0, 1]


def test_layers_that_the_model_has_not_are_none_to_drop_rows_at():
    assert selection_of(GivenRowsSelector(((0, REUSED), (1, (3, 4)), (LAYERS, (3,))))).drop_layers == (1,)


def test_given_layers_narrow_the_rows_at_exactly_their_layers():
    selection = selection_of(GivenRowsSelector(((0, REUSED), (1, (3, 4, 8)), (3, (8,)))))
    assert [selection.drops_at(layer) for layer in range(LAYERS)] == [False, True, False, True]
    assert not any(selection.needs_deviation_at(layer) for layer in range(LAYERS))
    assert selection.positions.tolist() == [0, 1, *REUSED]
    assert selection.narrow(1).tolist() == [position in (0, 1, 3, 4, 8) for position in (0, 1, *REUSED)]
    assert selection.positions.tolist() == [0, 1, 3, 4, 8]
    assert selection.narrow(3).tolist() == [True, True, False, False, True]
    assert selection.rows == (8,)
    assert selection.layer_rows == ((0, REUSED), (1, (3, 4, 8)), (3, (8,)))


def test_a_row_that_was_dropped_does_not_come_back():
    selection = selection_of(GivenRowsSelector(((0, (3, 4)), (1, (3, 5)))))
    selection.narrow(1)
    assert selection.rows == (3,)


def test_rows_before_the_start_are_not_computed_again_and_still_belong_to_the_choice():
    selection = selection_of(GivenRowsSelector(((0, (3, 5, 8)), (1, (3, 8)))), start=5)
    assert selection.positions.tolist() == [5, 8]
    assert selection.rows == (3, 5, 8)
    assert selection.narrow(1).tolist() == [False, True]
    assert selection.positions.tolist() == [8]
    assert selection.layer_rows == ((0, (3, 5, 8)), (1, (3, 8)))


def test_the_ratio_is_the_mean_over_the_layers():
    selection = selection_of(GivenRowsSelector(((0, REUSED), (1, (3, 4)), (2, (3,)))))
    selection.count_layers(1)
    selection.narrow(1)
    selection.count_layers(1)
    selection.narrow(2)
    selection.count_layers(2)
    assert selection.ratio == pytest.approx((7 + 2 + 1 + 1) / (4 * 7))


@st.composite
def nested_layers(draw):
    rows, layers = set(REUSED), []
    for layer in (0, *sorted(draw(st.sets(st.integers(1, LAYERS - 1))))):
        rows = draw(st.sets(st.sampled_from(sorted(rows)))) if rows else rows
        layers.append((layer, tuple(sorted(rows))))
    return tuple(layers)


@settings(max_examples=100, deadline=None)
@given(nested_layers(), st.integers(0, 9))
def test_a_replays_account_of_its_rows_is_the_rows_it_was_given(layers, start):
    selection = selection_of(GivenRowsSelector(layers), start)
    for layer in range(LAYERS):
        if selection.drops_at(layer):
            selection.narrow(layer)
    assert selection.layer_rows == layers
    assert selection.rows == layers[-1][1]
    assert all(position >= start for position in selection.positions.tolist())


class Blends:
    """A tiny model whose chunks were collected behind a head, and one prompt over them."""

    def __init__(self, model) -> None:
        self.runner = ReferenceRunner(model, ChunkStore(None, 1 << 30))
        generator = torch.Generator().manual_seed(7)
        draw = [tuple(torch.randint(3, 256, (n,), generator=generator).tolist()) for n in (9, 40, 30, 25, 8)]
        self.head, *self.chunks, self.question = draw
        self.runner.collect(self.chunks, self.head)
        # The first chunk stands where it was encoded: its rows are exact, and none is chosen.
        self.choosable = tuple(range(9 + 40, 9 + 95))

    def plan(self, selector) -> BlendPlan:
        identities = [ChunkIdentity(self.runner.fingerprint, self.head, chunk) for chunk in self.chunks]
        return plan_of(identities, selector, self.question, self.head)

    def run(self, selector):
        logits, report = self.runner.score(self.plan(selector))
        return logits[-1], report


@pytest.fixture(scope="module")
def blends(make_tiny_model) -> Blends:
    return Blends(make_tiny_model("llama-default"))


def layers_of(blends: Blends, selector: DeviationSelector):
    """The rows of a deviation blend from layer to layer.

    What a check layer keeps does not depend on later ones, so it is what a blend ends with that has only those up to
    it, with the same shares.
    """
    layers = [(0, blends.choosable)]
    shares = selector.shares(LAYERS)
    for index, (layer, share) in enumerate(shares):
        widen = shares[0][1] / share
        partial = DeviationSelector(share, tuple(layer for layer, _ in shares[: index + 1]), widen)
        wanted = [share for _, share in shares[: index + 1]]
        assert [share for _, share in partial.shares(LAYERS)] == pytest.approx(wanted)
        layers.append((layer, blends.run(partial)[1].rows))
    return tuple(layers)


@pytest.mark.parametrize(
    "selector",
    [
        DeviationSelector(0.2),
        DeviationSelector(0.2, (2,)),
        DeviationSelector(0.2, (1, 2)),
        DeviationSelector(0.2, (1, 3), widen=3.0),
    ],
    ids=lambda selector: selector.spec,
)
def test_replaying_the_rows_of_a_deviation_blend_is_the_blend_itself(blends, selector):
    layers = layers_of(blends, selector)
    assert [len(rows) for _, rows in layers] == [
        55,
        *(min(55, round(share * 95)) for _, share in selector.shares(LAYERS)),
    ]
    logits, report = blends.run(selector)
    replayed, again = blends.run(GivenRowsSelector(layers))
    assert torch.equal(replayed, logits)
    assert again.rows == report.rows == layers[-1][1]
    assert again.recomputed_ratio == pytest.approx(report.recomputed_ratio)
    assert (again.mode, again.reused_tokens) == ("blend", 95)


def test_a_replay_with_one_layers_rows_changed_is_another_blend(blends):
    """So the equality above is not an equality of everything with everything."""
    selector = DeviationSelector(0.2, (1, 2))
    bottom, middle, top = layers_of(blends, selector)
    logits, _ = blends.run(selector)
    at_once = GivenRowsSelector((bottom, (1, top[1])))
    late = GivenRowsSelector((bottom, (2, top[1])))
    everywhere = GivenRowsSelector.everywhere(top[1])
    shifted = GivenRowsSelector((bottom, middle, (2, middle[1][: len(top[1])])))
    for other in (at_once, late, everywhere, shifted):
        assert float((blends.run(other)[0] - logits).abs().max()) > 1e-4


def test_replaying_a_query_blend_is_the_blend_itself(blends):
    logits, report = blends.run(make_selector("query", 0.2))
    replayed, again = blends.run(GivenRowsSelector.everywhere(report.rows))
    assert again.rows == report.rows
    assert float((replayed - logits).abs().max()) <= 1e-5


@given(values=st.sets(st.integers(0, 200)), wanted=st.lists(st.integers(-3, 200)))
def test_members_are_those_that_are_wanted(values, wanted):
    found = members(torch.tensor(sorted(values), dtype=torch.int64), wanted)
    assert found.dtype is torch.bool
    assert found.tolist() == [value in wanted for value in sorted(values)]
