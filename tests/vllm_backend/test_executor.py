"""Which orders are blended together, and what one step may cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from connector_samples import identity_of, ids_of, plan_of
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from cacheblend.selectors import make_selector
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.selectors.selection import RowSelection
from cacheblend.vllm_backend.executor import PLACED_PER_BATCH, BlendExecutor, rows_computed
from cacheblend.vllm_backend.messages import BlendOrder
from cacheblend.vllm_backend.rows import NO_SLOT
from kvstore.key import ShardLayout
from kvstore.store import ChunkStore

FIRST, SECOND = identity_of(1, tokens=10), identity_of(2, tokens=6)
FRESH = ids_of(3, tokens=5)


def order_of(request_id, parts=(FRESH, FIRST, SECOND), selector="none", question=(7, 8, 9), **options) -> BlendOrder:
    chosen = selector if isinstance(selector, GivenRowsSelector) else make_selector(selector, **options)
    plan = plan_of(parts, chosen, question)
    return BlendOrder(request_id, plan, tuple(range(1, 9)), 0, plan.question.start)


def executor_of(most_rows=100, rows_per_step=100, orders=()) -> BlendExecutor:
    """One whose model cannot run: nothing here lets it come to that, or the failure is what is looked at."""
    model: Any = object()
    ranks: Any = SimpleNamespace(shard=ShardLayout())
    executor = BlendExecutor(model, ChunkStore(None, 0), ranks, most_rows, rows_per_step)
    for order in orders:
        executor.submit(order)
    return executor


def batches(executor) -> list[list[str]]:
    taken = []
    while executor.busy:
        taken.append([order.request_id for order in executor._take_batch()])
        assert taken[-1], "orders wait, and none is taken"
    return taken


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        (order_of("a"), 5),
        (order_of("a", selector="full"), 5 + 16),
        (order_of("a", selector="chunk_head", head_tokens=8), 5 + 8 + 6),
        (order_of("a", selector="chunk_head", ratio=0.5), 5 + 5 + 3),
        (order_of("a", selector="deviation", ratio=0.25), 5 + 16),
        (order_of("a", selector="chunk_head+deviation"), 5 + 16),
        (order_of("a", selector="query", ratio=0.25), 5 + 4 + 5 + 3),
        (order_of("a", selector="chunk_head+query", ratio=0.25, head_tokens=3), 5 + 6 + 5 + 3),
        (order_of("a", selector="deviation", ratio=1.0), 5 + 16),
        (order_of("a", selector="query", ratio=1.0), 5 + 16),
        (order_of("a", selector="chunk_head+query", ratio=1.0), 5 + 16),
        (order_of("a", selector="query", ratio=0.99), 5 + 16 + 5 + 3),
        (order_of("a", parts=(FIRST, FRESH, SECOND)), 5),
        (order_of("a", selector=GivenRowsSelector.everywhere((5, 6, 7))), 5 + 3),
        (BlendOrder("a", plan_of([FRESH, ids_of(1)], None), (1,), 0, 9), 9),
    ],
    ids=lambda value: getattr(getattr(value, "plan", None), "selector", None) and value.plan.selector.spec,
)
def test_an_order_costs_the_rows_it_computes_fresh_chosen_and_asked(order, rows):
    assert rows_computed(order) == rows


@pytest.mark.parametrize(
    "selector",
    [
        make_selector("none"),
        make_selector("full"),
        make_selector("chunk_head", head_tokens=3),
        make_selector("chunk_head", 0.3),
        make_selector("deviation"),
        make_selector("deviation", 1.0),
        make_selector("query", 1.0),
        GivenRowsSelector.everywhere((5, 9, 15)),
        GivenRowsSelector(((0, tuple(range(5, 21))), (1, (5, 9, 15)), (2, (9,)))),
    ],
    ids=lambda selector: selector.spec,
)
def test_an_order_costs_what_enters_its_first_layer(selector):
    """A replay of a blend that narrowed costs what that blend did, not what was left of it."""
    plan = plan_of([FRESH, FIRST, SECOND], selector)
    selection = RowSelection(plan, 4, torch.device("cpu"), torch.arange(5))
    assert rows_computed(BlendOrder("a", plan, (1,), 0, 21)) == len(selection.positions)


def test_orders_that_fit_a_step_are_blended_together_in_their_order():
    executor = executor_of(rows_per_step=10, orders=[order_of(name) for name in "abcde"])
    assert batches(executor) == [["a", "b"], ["c", "d"], ["e"]]


def test_an_order_larger_than_a_step_is_blended_alone_and_stops_nobody():
    orders = [order_of("small"), order_of("large", selector="full"), order_of("last")]
    assert batches(executor_of(rows_per_step=10, orders=orders)) == [["small"], ["large"], ["last"]]


def test_a_large_order_is_not_passed_by_a_small_one_behind_it():
    orders = [order_of("a"), order_of("b"), order_of("large", selector="full"), order_of("c")]
    assert batches(executor_of(rows_per_step=12, orders=orders)) == [["a", "b"], ["large"], ["c"]]


@pytest.mark.parametrize(("most_rows", "together"), [(8, 2), (7, 1), (12, 3)])
def test_a_batch_moves_no_more_stored_rows_than_the_staging_buffers_are_for(most_rows, together):
    orders = [order_of(str(index), parts=(FIRST, SECOND)) for index in range(3)]
    assert together == max(1, PLACED_PER_BATCH * most_rows // 16)
    first = batches(executor_of(most_rows=most_rows, orders=orders))[0]
    assert first == ["0", "1", "2"][:together]


def test_a_step_of_few_rows_bounds_what_a_batch_moves_as_well():
    orders = [order_of(str(index), parts=(FIRST, SECOND)) for index in range(3)]
    assert batches(executor_of(most_rows=1000, rows_per_step=8, orders=orders)) == [["0", "1"], ["2"]]


@pytest.mark.parametrize("name", ["full", "query", "deviation"])
def test_orders_that_recompute_everything_move_no_stored_row_and_are_kept_apart_by_what_they_compute_alone(name):
    orders = [order_of(str(index), parts=(FIRST, SECOND), selector=name, ratio=1.0) for index in range(3)]
    assert batches(executor_of(most_rows=4, orders=orders)) == [["0", "1", "2"]]
    assert batches(executor_of(most_rows=4, rows_per_step=32, orders=orders)) == [["0", "1"], ["2"]]


def test_an_order_that_has_not_begun_can_be_dropped():
    executor = executor_of(orders=[order_of(name) for name in "abc"])
    assert executor.cancel("b")
    assert not executor.cancel("b")
    assert not executor.cancel("nobody")
    assert batches(executor) == [["a", "c"]]
    assert not executor.busy


def test_a_row_without_a_page_has_the_engines_own_mark():
    assert PAD_SLOT_ID == NO_SLOT


def test_nothing_to_do_is_no_progress():
    executor = executor_of()
    assert not executor.busy
    progress = executor.advance()
    assert (progress.done, progress.failed) == ({}, {})


def test_a_model_that_cannot_run_fails_every_order_by_name_and_leaves_nothing_behind(caplog):
    executor = executor_of(orders=[order_of(name) for name in "abc"])
    progress = executor.advance()
    assert progress.done == {}
    assert progress.failed == dict.fromkeys("abc", "AttributeError")
    assert not executor.busy
