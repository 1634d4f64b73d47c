"""Orders that are blended together: what each costs, and what lies in its pages afterwards.

The model is small enough to count what is asked of it. Its pages are NaN until they are written, so that a row which
is attended to before it is there shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from connector_samples import identity_of, ids_of, plan_of
from transformers import LlamaConfig

from cacheblend.kernels.pages import PagedLayer
from cacheblend.selectors import Selector, make_selector
from cacheblend.selectors.deviation import DeviationSelector
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.selectors.query import first_tallied_layer
from cacheblend.vllm_backend import blend as blend_module
from cacheblend.vllm_backend.attention import LayerRows, RowsAttention
from cacheblend.vllm_backend.blend import BlendBatch
from cacheblend.vllm_backend.hidden import Entering, Hidden
from cacheblend.vllm_backend.messages import BlendDone, BlendOrder
from cacheblend.vllm_backend.rotary import RotaryTables
from cacheblend.vllm_backend.rows import PromptRows, RowBatch
from cacheblend.vllm_backend.scoring import QuestionTally, ScoringAttention
from kvstore.chunk import ChunkKV
from kvstore.errors import UnavailableReason
from kvstore.key import ShardLayout
from kvstore.store import ChunkStore
from kvstore.tiers import Tier

CPU = torch.device("cpu")
LAYERS, DIM, BLOCK, BLOCKS = 4, 8, 4, 64
HEAD, FRESH, QUESTION = ids_of(3, tokens=5), ids_of(4, tokens=3), (7, 8, 9)
FIRST, SECOND = identity_of(1, tokens=10), identity_of(2, tokens=6)
PARTS = (HEAD, FIRST, FRESH, SECOND)
REUSED = (*range(5, 15), *range(18, 24))
LENGTH = 24

EVERYTHING = (
    make_selector("full"),
    make_selector("chunk_head", 1.0),
    make_selector("query", 1.0),
    make_selector("deviation", 1.0),
    DeviationSelector(1.0, (1, 3), widen=2.0),
    make_selector("chunk_head+query", 1.0),
    make_selector("chunk_head+deviation", 1.0),
)
ROUNDED = (make_selector("query", 0.99), make_selector("deviation", 0.99), make_selector("chunk_head+query", 0.99))
"""Of sixteen rows these choose sixteen, but by evidence."""
OTHERS = (
    make_selector("none"),
    make_selector("query", 0.3),
    make_selector("deviation", 0.3, check_layers=(1, 2)),
    make_selector("chunk_head+query", 0.3, 1),
)


def spec(selector: Selector) -> str:
    return selector.spec


class Pages:
    """One layer's pages, and how often each slot was written."""

    views = None

    def __init__(self) -> None:
        self.paged = PagedLayer(*torch.full((2, BLOCKS, BLOCK, 1, DIM), torch.nan))
        self.written = torch.zeros(BLOCKS * BLOCK, dtype=torch.int64)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        slots, kept = slots[slots >= 0], slots >= 0
        self.paged.keys[slots // BLOCK, slots % BLOCK] = keys[kept]
        self.paged.values[slots // BLOCK, slots % BLOCK] = values[kept]
        self.written[slots] += 1


class Model:
    """Layers that add what a row attends to; it stands where `LayersForward` does."""

    device, dtype = CPU, torch.float32
    num_layers, kv_heads, head_dim, block_size = LAYERS, 1, DIM, BLOCK

    def __init__(self, few: int = 0) -> None:
        self.pages = [Pages() for _ in range(LAYERS)]
        self.scoring_rows = self.recomputed_rows = self.compared = self.passes_at_once = 0
        self._few = few
        config = LlamaConfig(hidden_size=DIM, num_attention_heads=1, num_key_value_heads=1, head_dim=DIM)
        self.rotary = RotaryTables(config, CPU)

    def attention(self, rows: Any) -> RowsAttention:
        return RowsAttention(rows)

    def embed(self, rows: Any) -> Hidden:
        return Hidden(torch.sin(rows.token_ids[:, None] * (1.0 + torch.arange(DIM))), None)

    def keys_values(self, index: int, hidden: Hidden, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.compared += len(rows)
        return self._keys_values(index, hidden, rows)

    def _keys_values(self, index: int, hidden: Hidden, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.cos(rows.positions[:, None] * 0.1 * (1.0 + torch.arange(DIM)))
        return (hidden.states + place)[:, None] * (1.0 + index), (hidden.states - place)[:, None]

    def score_few(self, part: PromptRows, tally: QuestionTally, before_layer: Any) -> bool:
        if len(part.positions) > self._few:
            return False
        assert part.positions[-1] + 1 == tally.end
        rows = RowBatch([part], CPU)
        attention = ScoringAttention(rows, [tally], first_tallied_layer(LAYERS))
        self.run(0, LAYERS, self.embed(rows), rows, attention, before_layer, attend_last=True)
        self.passes_at_once += 1
        return True

    def recompute_alone(
        self, first: int, entering: Entering | None, part: PromptRows, drift: Any, before_layer: Any
    ) -> bool:
        if len(part.positions) > self._few:
            return False
        rows = RowBatch([part], CPU)
        hidden = self.embed(rows) if entering is None else entering.on(CPU)
        self.run(first, LAYERS, hidden, rows, RowsAttention(rows), before_layer, drift=drift)
        self.passes_at_once += 1
        return True

    def run(self, first, last, hidden, rows, attention, before_layer=None, *, attend_last=False, drift=None) -> Hidden:
        assert drift is None
        if isinstance(attention, ScoringAttention):
            self.scoring_rows += len(rows)
        elif first == 0:
            self.recomputed_rows += len(rows)
        states = hidden.states
        for index in range(first, last):
            before_layer(index)
            key, value = self._keys_values(index, Hidden(states, None), rows)
            self.pages[index].write(rows.slots, key, value)
            if index == LAYERS - 1 and not attend_last:
                break
            out = torch.empty_like(key)
            attention.attend(LayerRows(index, self.pages[index], states[:, None], key, value, 0.5, out))
            states = torch.tanh(states + out[:, 0])
        return Hidden(states, None)

    def rows(self, order: BlendOrder) -> torch.Tensor:
        """[layers, 2, rows, 1, dim]: what lies in an order's pages."""
        tables = torch.tensor(order.block_ids)
        return torch.stack([torch.stack(pages.paged.gather(tables, order.end)) for pages in self.pages])

    def times_written(self, order: BlendOrder) -> list[list[int]]:
        """How often each row was, layer by layer."""
        slots = (torch.tensor(order.block_ids)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: order.end]
        return [pages.written[slots].tolist() for pages in self.pages]


@dataclass
class Rank:
    """One of several ranks: what it was asked to agree on, and what the others cannot have."""

    others_miss: dict[str, str] = field(default_factory=dict)
    shard: ShardLayout = field(default_factory=ShardLayout)
    agreements: int = 0
    sums: int = 0

    def agree(self, reasons: dict[str, str]) -> dict[str, str]:
        self.agreements += 1
        return {**self.others_miss, **reasons}

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return values


@dataclass
class Blended:
    """What blending some orders came to."""

    orders: list[BlendOrder]
    model: Model
    rank: Rank
    done: dict[str, BlendDone]
    stages: set[str]

    def account(self, request_id: str) -> Any:
        return self.done[request_id].report


@pytest.fixture
def store() -> ChunkStore:
    """Both chunks, on the host, with KV that is no row's own."""
    store = ChunkStore(None, 1 << 20)
    for seed, identity in enumerate((FIRST, SECOND)):
        generator = torch.Generator().manual_seed(seed)
        store.put(ChunkKV(identity, torch.randn(LAYERS, 2, len(identity.token_ids), 1, DIM, generator=generator)))
    return store


def order_of(selector: Selector | None, number: int = 0, start: int = 0) -> BlendOrder:
    """The prompt in pages of its own; without a selector all of it is fresh."""
    parts = [part if selector or isinstance(part, tuple) else part.token_ids for part in PARTS]
    block_ids = tuple(range(8 * number, 8 * number + 7))[::-1]
    return BlendOrder(str(number), plan_of(parts, selector, QUESTION), block_ids, start, LENGTH)


def blend(store: ChunkStore, *orders: BlendOrder, most_rows: int = 100, few: int = 0, **rank: Any) -> Blended:
    model, ranks = Model(few), Rank(**rank)
    for order in orders:
        # What a prefix cache holds of a prompt that was all computed.
        if order.start:
            _fill(model, order, blend(store, replace(order_of(None), end=order.start)).model)
    batch: Any = BlendBatch(orders, model, store, ranks, most_rows)
    for _ in batch.pieces():
        pass
    stages = set(batch.times(wait=True)[orders[0].request_id].parts_ms)
    return Blended(list(orders), model, ranks, batch.done, stages)


def _fill(model: Model, order: BlendOrder, source: Model) -> None:
    filled = torch.arange(order.start)
    for pages, theirs in zip(model.pages, source.pages, strict=True):
        slots = torch.tensor(order.block_ids)[filled // BLOCK] * BLOCK + filled % BLOCK
        pages.write(slots, *theirs.paged.gather(torch.tensor(order_of(None).block_ids), order.start))
        pages.written.zero_()


def full_prefill(store: ChunkStore) -> torch.Tensor:
    order = order_of(None)
    return blend(store, order).model.rows(order)


def assert_near(rows: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("start", "most_rows"), [(0, 100), (0, 7), (4, 100), (9, 7), (18, 100)])
@pytest.mark.parametrize("selector", EVERYTHING, ids=spec)
def test_recomputing_everything_computes_each_row_once_and_does_nothing_else(store, selector, start, most_rows):
    order = order_of(selector, start=start)
    blended = blend(store, order, most_rows=most_rows)
    assert_near(blended.model.rows(order), full_prefill(store))
    assert blended.model.times_written(order) == [[0] * start + [1] * (LENGTH - start)] * LAYERS
    assert (blended.model.recomputed_rows, blended.model.scoring_rows, blended.model.compared) == (LENGTH - start, 0, 0)
    assert blended.stages == {"load", "recompute"}


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("selector", EVERYTHING, ids=spec)
def test_its_account_says_that_all_was_recomputed_and_nothing_read(store, selector, start):
    done = blend(store, order_of(selector, start=start)).done["0"]
    report = done.report
    assert (report.mode, report.selector) == ("blend", selector.spec)
    assert report.reused_tokens == report.recomputed_tokens == 16
    assert (report.recomputed_ratio, report.rows, report.bytes_loaded) == (1.0, REUSED, {})
    assert (done.layer_rows, done.unavailable) == (((0, REUSED),), {})


@pytest.mark.parametrize("selector", ROUNDED, ids=spec)
def test_a_share_that_only_rounds_to_all_rows_still_asks_for_evidence_and_still_gives_full_prefill(store, selector):
    order = order_of(selector)
    blended = blend(store, order)
    assert_near(blended.model.rows(order), full_prefill(store))
    assert blended.account("0").rows == REUSED
    assert blended.account("0").bytes_loaded == {"host": 16 * LAYERS * 2 * DIM * 4}
    assert blended.model.scoring_rows + blended.model.compared > 0
    assert blended.stages == {"load", "relocate", "score", "recompute"}


def test_all_rows_given_as_rows_are_placed_first_and_still_give_full_prefill(store):
    order = order_of(GivenRowsSelector.everywhere(REUSED))
    blended = blend(store, order)
    assert_near(blended.model.rows(order), full_prefill(store))
    assert blended.account("0").bytes_loaded.keys() == {"host"}


@pytest.mark.parametrize("other", OTHERS, ids=spec)
@pytest.mark.parametrize("selector", EVERYTHING, ids=spec)
def test_prompts_of_one_batch_get_what_each_gets_alone_though_one_recomputes_everything(store, selector, other):
    orders = [order_of(other, 0), order_of(selector, 1), order_of(other, 2, start=4)]
    together = blend(store, *orders, most_rows=11)
    for order in orders:
        alone = blend(store, order)
        assert_near(together.model.rows(order), alone.model.rows(order))
        assert together.done[order.request_id] == alone.done[order.request_id]
    assert together.account("0").bytes_loaded.keys() == together.account("2").bytes_loaded.keys() == {"host"}
    assert together.model.times_written(orders[1]) == [[1] * LENGTH] * LAYERS


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("selector", EVERYTHING, ids=spec)
def test_a_chunk_that_is_gone_changes_nothing_where_none_is_read_though_part_of_it_was_found(store, selector, start):
    order = order_of(selector, start=start)
    with_both = blend(store, order)
    store.evict(FIRST.key, Tier.HOST)
    blended = blend(store, order)
    assert blended.done == with_both.done
    assert_near(blended.model.rows(order), full_prefill(store))


@pytest.mark.parametrize("selector", OTHERS, ids=spec)
def test_a_chunk_that_is_gone_is_fresh_and_named_with_its_reason(store, selector):
    store.evict(FIRST.key, Tier.HOST)
    done = blend(store, order_of(selector)).done["0"]
    assert done.unavailable == {FIRST.key: UnavailableReason.EVICTED.value}
    report = done.report
    assert report.fallback_reasons == (UnavailableReason.EVICTED.value,)
    assert (report.mode, report.reused_tokens) == ("blend", 6)


@pytest.mark.parametrize("selector", EVERYTHING, ids=spec)
def test_what_another_rank_cannot_have_is_fresh_here_too(store, selector):
    missing = {SECOND.key: UnavailableReason.MISSING.value}
    order = order_of(selector)
    blended = blend(store, order, others_miss=missing)
    assert_near(blended.model.rows(order), full_prefill(store))
    assert (blended.done["0"].unavailable, blended.account("0").reused_tokens) == (missing, 10)


@pytest.mark.parametrize("here", [True, False], ids=["chunks here", "chunks gone here"])
@pytest.mark.parametrize("selector", [*EVERYTHING, *ROUNDED, *OTHERS], ids=spec)
def test_ranks_agree_once_an_order_and_add_up_alike_whatever_chunks_each_of_them_has(store, selector, here):
    gone = {identity.key: UnavailableReason.EVICTED.value for identity in (FIRST, SECOND)}
    orders = [order_of(selector, number) for number in range(2)]
    if not here:
        for key in gone:
            store.evict(key, Tier.HOST)
    one = blend(store, *orders, others_miss=gone).rank
    assert (one.agreements, one.sums) == (2, 0)


def test_ranks_add_up_nothing_for_prompts_that_recompute_everything(store):
    assert blend(store, *(order_of(selector, n) for n, selector in enumerate(EVERYTHING[:3]))).rank.sums == 0
    assert blend(store, order_of(make_selector("query", 0.3))).rank.sums == 1


@pytest.mark.parametrize("selector", [make_selector("none"), make_selector("full")], ids=spec)
def test_a_store_that_fails_when_it_is_asked_leaves_the_ranks_agreeing(store, monkeypatch, selector):
    def fetch(identity: Any) -> None:
        raise OSError("injected")

    monkeypatch.setattr(store, "fetch", fetch)
    order = order_of(selector)
    blended = blend(store, order)
    assert blended.rank.agreements == 1
    reads = set() if selector.recomputes_everything else {UnavailableReason.UNREADABLE.value}
    assert set(blended.done["0"].unavailable.values()) == reads
    assert_near(blended.model.rows(order), full_prefill(store))


@pytest.mark.parametrize("most_rows", [100, 7])
def test_only_rows_of_prompts_that_drop_some_by_their_deviation_are_compared(store, most_rows):
    narrowing, given = make_selector("deviation", 0.3), GivenRowsSelector(((0, REUSED), (1, REUSED[3:])))
    others = [make_selector("query", 0.3), make_selector("full"), given, None]
    together = [others[0], narrowing, *others[1:3], narrowing, narrowing, others[3]]
    orders = [order_of(selector, number, start=number) for number, selector in enumerate(together)]
    blended = blend(store, *orders, most_rows=most_rows)
    assert blended.model.compared == sum(LENGTH - number for number in (1, 4, 5))
    for order in orders:
        alone = blend(store, order)
        assert_near(blended.model.rows(order), alone.model.rows(order))
        assert blended.done[order.request_id] == alone.done[order.request_id]


def test_rows_that_are_given_as_dropped_are_neither_compared_nor_added_up_over_ranks(store):
    blended = blend(store, order_of(GivenRowsSelector(((0, REUSED), (1, REUSED[3:])))))
    assert (blended.model.compared, blended.rank.sums) == (0, 0)
    assert blended.account("0").rows == REUSED[3:]


def test_a_prompt_without_rows_left_has_none_compared_beside_others(store):
    moved = identity_of(1, tokens=10, prefix=HEAD)
    store.put(ChunkKV(moved, torch.randn(LAYERS, 2, 10, 1, DIM)))
    nothing = BlendOrder("0", plan_of([moved], DeviationSelector(0.0, (1, 2)), QUESTION), (0, 1, 2), 0, 10)
    blended = blend(store, nothing, order_of(make_selector("deviation", 0.3, check_layers=(2,)), 1))
    assert blended.model.compared == 10 + LENGTH
    assert blended.account("0").rows == ()


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("selector", [make_selector("none"), *OTHERS], ids=spec)
def test_passes_of_few_rows_that_run_at_once_leave_what_layer_after_layer_leaves(store, selector, start):
    orders = [order_of(selector, start=start)]
    at_once, layered = blend(store, *orders, few=20), blend(store, *orders)
    assert torch.equal(at_once.model.rows(orders[0]), layered.model.rows(orders[0]))
    assert at_once.done == layered.done
    assert at_once.model.passes_at_once == 1 + ("query" in selector.name)


def test_rows_that_are_compared_are_those_of_the_pass_before_and_not_brought_to_the_device_again(store, monkeypatch):
    made: list[RowBatch] = []

    class Counted(RowBatch):
        def __init__(self, parts: Any, device: torch.device) -> None:
            super().__init__(parts, device)
            made.append(self)

    monkeypatch.setattr(blend_module, "RowBatch", Counted)
    blended = blend(store, order_of(make_selector("deviation", 0.3, check_layers=(1, 2))))
    assert blended.model.compared > 0
    assert len(made) == 3


def test_passes_of_several_prompts_do_not_run_at_once(store):
    orders = [order_of(make_selector("query", 0.3), number) for number in range(2)]
    blended = blend(store, *orders, few=50)
    assert blended.model.passes_at_once == 0
    assert blended.model.scoring_rows > 0


def test_the_models_chunks_are_unlike_what_it_computes(store):
    """So the equalities with full prefill above are of rows that were recomputed."""
    order = order_of(make_selector("none"))
    difference = blend(store, order).model.rows(order) - full_prefill(store)
    assert difference.abs().amax((1, 2, 3, 4)).gt(0.1).all()
