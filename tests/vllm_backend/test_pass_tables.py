"""Passes whose rows tables tell of: what those say, and that layers over them do what plain attention does."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[1] / "cacheblend"))

from triton_interpreter import interpreted_results

from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.row_tiles import NO_PART, RowTiles, divide_rows, most_tiles, tile_config
from cacheblend.vllm_backend.pass_layers import PassLayers, Stack
from cacheblend.vllm_backend.pass_tables import Heads, PassTables
from cacheblend.vllm_backend.rows import NO_SLOT, PromptPages, PromptRows, RowBatch
from cacheblend.vllm_backend.scoring import QuestionTally

CPU = torch.device("cpu")
HEADS = Heads(query=4, kv=2, dim=16, dtype=torch.float32)
BLOCK, POSITIONS, MOST_ROWS = 4, 240, 40


def tables() -> PassTables:
    return PassTables(HEADS, MOST_ROWS, POSITIONS, BLOCK, CPU, partial_results=30 * MOST_ROWS)


def state(of: PassTables) -> list[list[Any]]:
    read = (of.token_ids, of.positions, of.slots, of.block_table, of.sizes, of.work, of.merges)
    return [table.tolist() for table in read]


@st.composite
def passes(draw) -> tuple[PromptRows, QuestionTally | None]:
    """Rows of one prompt, and its question's tally if that is behind them."""
    length, seed = draw(st.integers(2, POSITIONS - 1)), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(POSITIONS // BLOCK + 9, generator=generator)[
        : -(-length // BLOCK) + draw(st.integers(0, 3))
    ]
    pages = PromptPages([seed * 1000 + place for place in range(length)], blocks, BLOCK)
    start = draw(st.integers(max(0, length - 28), length - 1)) if draw(st.booleans()) else length
    fresh = sorted(draw(st.sets(st.integers(0, start - 1), max_size=12))) if start else []
    if start == length:
        fresh = fresh or [0]
        return PromptRows(pages, torch.tensor(fresh)), None
    positions = torch.tensor([*fresh, *range(start, length)])
    return PromptRows(pages, positions, positions < start), QuestionTally(pages, start, length, HEADS.kv, CPU)


@settings(max_examples=80, deadline=None)
@given(passes(), passes())
def test_tables_tell_a_pass_whatever_they_told_before_and_what_they_have_more_does_nothing(before, told):
    filled = tables()
    assert filled.fill(*before)
    assert filled.fill(*told)
    rows, tally = told
    count, batch = len(rows.positions), RowBatch([rows], CPU)
    assert torch.equal(filled.token_ids[:count], batch.token_ids)
    assert torch.equal(filled.positions[:count], batch.positions)
    assert torch.equal(filled.slots[:count], batch.slots)
    assert (filled.slots[count:] == NO_SLOT).all()
    blocks = rows.prompt.block_ids[: len(filled.block_table)]
    assert filled.block_table[: len(blocks)].tolist() == blocks.tolist()
    asking = 0 if tally is None else tally.end - tally.start
    expected = [0] * 5 if tally is None else [count - asking, asking, asking, tally.start]
    assert filled.sizes.tolist()[: len(expected)] == expected
    fresh = rows.positions[: count - asking]
    heads = {"heads": HEADS.query, "kv_heads": HEADS.kv, "head_dim": HEADS.dim, "dtype": HEADS.dtype, "device": CPU}
    tiles = RowTiles.of(torch.zeros_like(fresh), fresh, **heads)
    items, merges = len(tiles.work), len(tiles.merges)
    assert torch.equal(filled.work[:items], tiles.work)
    assert torch.equal(filled.merges[:merges], tiles.merges)
    assert (filled.work[items:, 1] == 0).all()
    assert (filled.work[items:, -1] == NO_PART).all()
    assert not filled.merges[merges:].any()


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 131_071), min_size=1, max_size=256).map(sorted),
    st.sampled_from([(1, 8), (4, 8), (6, 2), (7, 4), (1, 2), (4, 1)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([64, 128]),
    st.sampled_from([48, 78, 132, 148]),
)
@example([64_000], (4, 1), torch.bfloat16, 64, 78)
@example([121_344], (4, 1), torch.bfloat16, 64, 148)
def test_no_rows_of_one_request_make_more_items_than_there_is_room_for(places, heads, dtype, dim, processors):
    config = tile_config(dtype, dim, heads[0], CPU)
    places = torch.tensor(places).numpy()
    division = divide_rows(places * 0, places, *heads, config, processors)
    items, merges = most_tiles(len(places), *heads, config, processors)
    assert len(division.work) <= items
    assert division.parts <= items
    assert len(division.merges) <= merges


def prompt_of(length: int) -> PromptPages:
    return PromptPages.of(list(range(length)), list(range(1, -(-length // BLOCK) + 1)), BLOCK)


REFUSED = {
    "more rows than any graph": (range(MOST_ROWS + 1), None),
    "a part of a question": ([*range(3), *range(50, 58)], (50, 60)),
    "the rest of a question": ([*range(3), *range(52, 60)], (50, 60)),
    "a question of more rows than any graph": (range(100, 100 + MOST_ROWS + 1), (100, 100 + MOST_ROWS + 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pass_without_room_is_refused_and_leaves_the_tables_as_they_were(name):
    places, question = REFUSED[name]
    filled, pages = tables(), prompt_of(160)
    filled.fill(PromptRows(pages, torch.tensor([4, 9])), None)
    before = state(filled)
    tally = None if question is None else QuestionTally(pages, *question, HEADS.kv, CPU)
    assert not filled.fill(PromptRows(pages, torch.tensor(list(places))), tally)
    assert state(filled) == before


class Attention:
    """An attention module, in whose place the pass puts its own."""

    head_size = HEADS.dim
    impl = SimpleNamespace(scale=0.3)

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the layer's own attention ran")


class Layer:
    """A decoder layer in small."""

    def __init__(self, attention: Attention, seed: int, hidden: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.attention = attention
        sizes = [HEADS.query * HEADS.dim, HEADS.kv * HEADS.dim, HEADS.kv * HEADS.dim]
        self.project = torch.randn(hidden, sum(sizes), generator=g) / hidden**0.5
        self.output = torch.randn(sizes[0], hidden, generator=g) / sizes[0] ** 0.5
        self.sizes = sizes

    def qkv(self, positions: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((states + 0.1 * positions[:, None].cos()) @ self.project).split(self.sizes, 1)

    def __call__(
        self, positions: torch.Tensor, states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = states if residual is None else residual
        return states + self.attention.forward(*self.qkv(positions, states)) @ self.output, residual


class Pages:
    """A layer's pages; what no slot was written to is not a number."""

    def __init__(self, blocks: int) -> None:
        kv = torch.full((2, blocks, BLOCK, HEADS.kv, HEADS.dim), torch.nan)
        self.paged = PagedLayer(*kv)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        live = slots != NO_SLOT
        at = slots[live] // BLOCK, slots[live] % BLOCK
        self.paged.keys[at], self.paged.values[at] = keys[live], values[live]


LAYERS, HIDDEN, FIRST_TALLIED = 2, 24, 1


class Model:
    """A few layers, and the pages of one prompt whose rows are stored but for the fresh ones."""

    def __init__(self, prompt: PromptPages, stored: torch.Tensor) -> None:
        g = torch.Generator().manual_seed(7)
        self.table = torch.randn(POSITIONS, HIDDEN, generator=g)
        self.attention = [Attention() for _ in range(LAYERS)]
        self.layers = [Layer(module, seed, HIDDEN) for seed, module in enumerate(self.attention)]
        self.pages = [Pages(int(prompt.block_ids.max()) + 2) for _ in range(LAYERS)]
        for pages in self.pages:
            kv = torch.randn(2, len(stored), HEADS.kv, HEADS.dim, generator=g)
            pages.write(prompt.slots(stored), *kv)

    def stack(self) -> Stack:
        pages: Any = self.pages
        return Stack(self.embed, self.layers, self.attention, pages, FIRST_TALLIED)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[token_ids % POSITIONS]

    def plainly(self, rows: PromptRows, start: int) -> torch.Tensor:
        """What the rows from `start` on pay to each position before, by one softmax a row; their KV goes nowhere."""
        states, mass = self.embed(rows.positions), torch.zeros(HEADS.kv, start)
        asking = rows.positions >= start
        for index, (layer, pages) in enumerate(zip(self.layers, self.pages, strict=True)):
            query, key, value = (x.view(len(states), -1, HEADS.dim) for x in layer.qkv(rows.positions, states))
            pages.write(rows.slots(), key, value)
            cached = pages.paged.gather(rows.prompt.block_ids, start)
            keys, values = (
                torch.cat([old, new[asking]]).repeat_interleave(HEADS.query // HEADS.kv, 1)
                for old, new in zip(cached, (key, value), strict=True)
            )
            scores = torch.einsum("qhd,khd->hqk", query, keys.nan_to_num()) * Attention.impl.scale
            hidden = torch.arange(len(keys)) > rows.positions[:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            if index >= FIRST_TALLIED:
                mass += weights[:, asking, :start].sum(1).view(HEADS.kv, HEADS.query // HEADS.kv, start).sum(1)
            attended = torch.einsum("hqk,khd->qhd", weights, values.nan_to_num()).reshape(len(states), -1)
            states = states + attended @ layer.output
        return mass


PASSES = {
    "a question behind fresh rows": ([0, 1, 2, 77, 78], (150, 159)),
    "fresh rows alone": ([0, 1, 2, 77, 78, 149], None),
    "a short question where a long one was": ([], (40, 42)),
}


def interpret_the_passes() -> dict[str, tuple[float, float]]:
    """Run in a process whose triton interprets: errors of the mass, and of the KV that is left in the pages."""
    found = {}
    filled = tables()
    for name, (fresh, question) in PASSES.items():
        start, end = question or (150, 150)
        prompt = PromptPages.of(list(range(POSITIONS - 1)), list(range(60, 0, -1)), BLOCK)
        stored = torch.tensor([place for place in range(start) if place not in fresh], dtype=torch.int64)
        positions = torch.tensor([*fresh, *range(start, end)])
        rows = PromptRows(prompt, positions, positions < start)
        ours, plain = Model(prompt, stored), Model(prompt, stored)
        tally = None if question is None else QuestionTally(prompt, start, end, HEADS.kv, CPU)
        assert filled.fill(rows, tally)
        layers = PassLayers(ours.stack(), filled, CPU)
        hidden = None
        for part in (range(1), range(1, LAYERS)):
            hidden = layers.run(part, MOST_ROWS, hidden)
        assert hidden is None
        expected = plain.plainly(rows, start)
        kv = [torch.stack([torch.stack([p.paged.keys, p.paged.values]) for p in m.pages]) for m in (ours, plain)]
        mass = layers.mass[:, :start]
        assert question is not None or not layers.mass.any()
        off = (mass - expected).abs().max() if question is not None and start else torch.zeros(())
        found[name] = float(off), float((kv[0].nan_to_num(9.0) - kv[1].nan_to_num(9.0)).abs().max())
    return found


if importlib.util.find_spec("triton"):

    @pytest.fixture(scope="module")
    def interpreted():
        return interpreted_results(__file__)

    @pytest.mark.parametrize("name", PASSES)
    def test_layers_over_tables_write_and_tally_what_plain_attention_does(interpreted, name):
        of_mass, of_pages = interpreted[name]
        assert of_mass < 1e-4
        assert of_pages < 1e-4


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpret_the_passes()))
