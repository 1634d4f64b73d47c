"""Passes whose rows tables tell of: what those say, and that layers over them do what plain attention does."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[1] / "cacheblend"))

from triton_interpreter import interpreted_results

from cacheblend.kernels.carry_drift import ChunkRange, DriftingRows, DriftTable, moved_rows
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.place_rows import Rotations
from cacheblend.kernels.row_tiles import NO_PART, RowTiles, divide_rows, divide_rows_alone, most_tiles, tile_config
from cacheblend.vllm_backend.hidden import Entering, Hidden
from cacheblend.vllm_backend.layer_graphs import LayerGraph, RowsGraph
from cacheblend.vllm_backend.layer_passes import LayerPasses
from cacheblend.vllm_backend.pass_layers import PassLayers, Stack
from cacheblend.vllm_backend.pass_tables import Heads, PassRoom, PassTables
from cacheblend.vllm_backend.rows import NO_SLOT, PromptPages, PromptRows, RowBatch
from cacheblend.vllm_backend.scoring import QuestionTally

CPU = torch.device("cpu")
HEADS = Heads(query=4, kv=2, dim=16, dtype=torch.float32)
BLOCK, POSITIONS, MOST_ROWS = 4, 240, 40


MOVED_ROWS, MOVED_CHUNKS = 180, 4


def tables() -> PassTables:
    """As passes have that score."""
    return PassTables(HEADS, PassRoom(MOST_ROWS, POSITIONS, partial_results=30 * MOST_ROWS), BLOCK, CPU)


def drift_tables() -> PassTables:
    """As passes have that recompute."""
    return PassTables(
        HEADS, PassRoom(MOST_ROWS, POSITIONS, moved_rows=MOVED_ROWS, moved_chunks=MOVED_CHUNKS), BLOCK, CPU
    )


def state(of: PassTables) -> list[list[Any]]:
    moves = (of.drifting.of_pass, of.drifting.of_pass_slots, of.drifting.told_positions, of.drifting.tiles)
    read = (of.token_ids, of.positions, of.slots, of.block_table, of.sizes, of.work, of.merges, *moves)
    return [table.tolist() for table in read]


def drift_of(prompt: PromptPages, positions: list[int], chunks: list[range]) -> DriftTable:
    """What moves with the rows at `positions`, all of which are computed in one pass."""
    ranges: list[ChunkRange] = []
    of_pass, left = [], []
    for chunk in chunks:
        telling = [index for index, place in enumerate(positions) if place in chunk]
        moving = [place for place in chunk if place not in positions]
        counts = sum(map(len, left)), sum(map(len, of_pass))
        ranges.append(ChunkRange(counts[0], counts[0] + len(moving), counts[1], counts[1] + len(telling)))
        of_pass.append(np.array(telling))
        left.append(np.array(moving))
    told = [np.array(positions)[index] for index in of_pass]
    at = [np.arange(sum(map(len, told)))]
    slots = prompt.all_slots.numpy()
    return DriftTable.of(
        ranges, of_pass, [slots[rows] for rows in told], at, told, [slots[rows] for rows in left], left
    )


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


@st.composite
def drifting_passes(draw) -> tuple[PromptRows, DriftTable | None]:
    """Rows of one prompt that are recomputed, and the other rows of their chunks, if these move."""
    chunks, first = [], draw(st.integers(0, 20))
    for length in draw(st.lists(st.integers(2, 40), min_size=1, max_size=MOVED_CHUNKS)):
        chunks.append(range(first, first + length))
        first += length + draw(st.integers(0, 9))
    positions = sorted(
        place for c in chunks for place in draw(st.sets(st.sampled_from(c), min_size=1, max_size=min(9, len(c) - 1)))
    )
    prompt = prompt_of(POSITIONS)
    drift = drift_of(prompt, positions, chunks) if draw(st.booleans()) else None
    return PromptRows(prompt, torch.tensor(positions)), drift


@settings(max_examples=80, deadline=None)
@given(drifting_passes(), drifting_passes())
def test_tables_tell_what_moves_with_a_pass_whatever_moved_before_and_nothing_else(before, told):
    filled = drift_tables()
    for rows, drift in (before, told):
        assert filled.fill(rows, None, drift)
    rows, drift = told
    count, of_tables = len(rows.positions), filled.drifting
    assert torch.equal(filled.positions[:count], rows.positions)
    telling, tiles = (0, 0) if drift is None else (len(drift.columns[0]), len(drift.tiles))
    assert (of_tables.of_pass_slots[telling:] == NO_SLOT).all()
    assert not of_tables.tiles[tiles:].any()
    if drift is not None:
        expected, moved = DriftingRows.on(CPU, drift), len(drift.columns[-1])
        assert torch.equal(of_tables.tiles[:tiles], expected.tiles)
        for name in ("of_pass", "of_pass_slots", "of_pass_at", "told_positions"):
            assert torch.equal(getattr(of_tables, name)[:telling], getattr(expected, name))
        for name in ("left_slots", "left_positions"):
            assert torch.equal(getattr(of_tables, name)[:moved], getattr(expected, name))


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
    alone = divide_rows_alone(places, *heads, config, processors)
    assert all(np.array_equal(one, other) for one, other in zip(division, alone, strict=True))
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


MOVES_TOO_MUCH = {
    "more rows than there is room for": [range(MOVED_ROWS + 2)],
    "more chunks than there are tiles for": [range(at, at + 3) for at in range(0, 180, 18)],
}


@pytest.mark.parametrize("name", MOVES_TOO_MUCH)
def test_a_pass_with_which_too_much_moves_is_refused_and_leaves_the_tables_as_they_were(name):
    filled, pages, chunks = drift_tables(), prompt_of(POSITIONS), MOVES_TOO_MUCH[name]
    filled.fill(PromptRows(pages, torch.tensor([4, 9])), None, drift_of(pages, [4, 9], [range(12)]))
    before, positions = state(filled), [chunk.start for chunk in chunks]
    assert not filled.fill(PromptRows(pages, torch.tensor(positions)), None, drift_of(pages, positions, chunks))
    assert state(filled) == before


def test_tables_of_passes_that_score_move_nothing_and_those_of_others_take_no_question():
    pages = prompt_of(POSITIONS)
    few, rows = [4, 9], torch.tensor([4, 9])
    assert not tables().fill(PromptRows(pages, rows), None, drift_of(pages, few, [range(12)]))
    question = QuestionTally(pages, 50, 52, HEADS.kv, CPU)
    assert not drift_tables().fill(PromptRows(pages, torch.tensor([4, 50, 51])), question)


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

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = slots // BLOCK, slots % BLOCK
        return self.paged.keys[at], self.paged.values[at]

    def move(self, rows: DriftingRows, keys: torch.Tensor, values: torch.Tensor) -> None:
        """By the twin of the kernels."""
        of_all = rotations()
        turns = [
            (torch.cat([of_all.cos[at]] * 2, 1), torch.cat([of_all.sin[at]] * 2, 1))
            for at in (rows.told_positions, rows.left_positions)
        ]
        new, stored = (keys[rows.of_pass], values[rows.of_pass]), self.read(rows.of_pass_slots)
        moved = moved_rows(rows, (turns[0], turns[1]), 1.0, new, stored, self.read(rows.left_slots))
        self.write(rows.left_slots, *moved)


LAYERS, HIDDEN, FIRST_TALLIED = 3, 24, 1


def rotations() -> Rotations:
    angles = torch.arange(POSITIONS)[:, None] / torch.logspace(0, 3, HEADS.dim // 2)
    return Rotations(angles.cos(), angles.sin(), 1.0)


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
        return Stack(self.embed, self.layers, self.attention, pages, FIRST_TALLIED, rotations())

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[token_ids % POSITIONS]

    def plainly(
        self, rows: PromptRows, start: int, drift: DriftTable | None = None, first: int = 0, states: Any = None
    ) -> torch.Tensor:
        """What the rows from `start` on pay to each position before, by one softmax a row; their KV goes nowhere."""
        states, mass = self.embed(rows.positions) if states is None else states, torch.zeros(HEADS.kv, start)
        asking = rows.positions >= start
        for index, (layer, pages) in enumerate(zip(self.layers[first:], self.pages[first:], strict=True), first):
            query, key, value = (x.view(len(states), -1, HEADS.dim) for x in layer.qkv(rows.positions, states))
            if drift is not None:
                pages.move(DriftingRows.on(CPU, drift), key, value)
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


CHUNKS = [range(10, 90), range(90, 121)]
RECOMPUTED = [10, 13, 40, 41, 42, 90, 120]
RECOMPUTING = {
    "rows with which others move": (RECOMPUTED, CHUNKS, 0),
    "rows that enter a later layer": (RECOMPUTED, CHUNKS, 1),
    "rows of one chunk where those of two were": ([95, 96], CHUNKS[1:], 0),
    "rows with which nothing moves where something did": ([3, 95, 96], None, 1),
}


class Replayed:
    """Stands for a CUDA graph: does what was captured."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def graph_of(model: Model, rows: int) -> RowsGraph:
    """What the model's layers do row by row, in tensors that stay; all layers hand on in one."""
    positions, states = torch.zeros(rows, dtype=torch.int64), torch.full((rows, HIDDEN), torch.nan)
    attended = torch.zeros(rows, HEADS.query * HEADS.dim)
    layers = []
    for layer in model.layers:
        qkv = [torch.zeros(rows, size // HEADS.dim, HEADS.dim) for size in layer.sizes]

        def before(layer: Layer = layer, qkv: list[torch.Tensor] = qkv) -> None:
            for held, found in zip(qkv, layer.qkv(positions, states), strict=True):
                held.copy_(found.view(held.shape))

        def after(layer: Layer = layer) -> None:
            states.add_(attended @ layer.output)

        graphs: Any = (Replayed(before), Replayed(after))
        layers.append(LayerGraph(*graphs, Hidden(states, None), *qkv, Hidden(states, None)))
    return RowsGraph(rows, positions, attended, tuple(layers))


def passed(layers: PassLayers, first: int, hidden: Hidden | None) -> None:
    """Through the layers from `first` on, in groups."""
    for part in (range(index, index + 1) for index in range(first, LAYERS)):
        hidden = layers.run(part, MOST_ROWS, hidden)
    assert hidden is None


def difference(ours: Model, plain: Model) -> float:
    """Of the KV that is left in the pages."""
    kv = [torch.stack([torch.stack([p.paged.keys, p.paged.values]) for p in m.pages]) for m in (ours, plain)]
    return float((kv[0].nan_to_num(9.0) - kv[1].nan_to_num(9.0)).abs().max())


def interpret_recomputing() -> dict[str, float]:
    """Run in a process whose triton interprets: errors of the KV that is left in the pages."""
    found, filled = {}, drift_tables()
    for name, (positions, chunks, first) in RECOMPUTING.items():
        prompt = PromptPages.of(list(range(POSITIONS - 1)), list(range(60, 0, -1)), BLOCK)
        rows = PromptRows(prompt, torch.tensor(positions))
        ours, plain = Model(prompt, torch.arange(150)), Model(prompt, torch.arange(150))
        drift = None if chunks is None else drift_of(prompt, positions, chunks)
        assert filled.fill(rows, None, drift)
        states = torch.randn(len(positions), HIDDEN, generator=torch.Generator().manual_seed(3))
        entering = torch.zeros(MOST_ROWS, HIDDEN)
        entering[: len(states)] = states
        passed(PassLayers(ours.stack(), filled, CPU), first, Hidden(entering, None) if first else None)
        plain.plainly(rows, 150, drift, first, states if first else None)
        found[name] = difference(ours, plain)
        layer_by_layer = Model(prompt, torch.arange(150))
        graph = graph_of(layer_by_layer, len(positions) + 3)
        graphs: Any = SimpleNamespace(for_rows=lambda _, graph=graph: graph)
        passes = LayerPasses(graphs, PassLayers(layer_by_layer.stack(), filled, CPU), filled)
        before: list[int] = []
        # Among others that go on no further.
        index = np.arange(len(positions))[::-1] * 2 + 1
        leaving = torch.full((2 * len(positions), HIDDEN), torch.nan)
        leaving[index.tolist()] = states
        entering_later = Entering(Hidden(leaving, None), index) if first else None
        assert passes.recompute(first, entering_later, rows, drift, before.append)
        assert before == list(range(first, LAYERS))
        found[f"{name}, layer by layer"] = difference(layer_by_layer, plain)
    return found


def interpret_the_passes() -> dict[str, tuple[float, float]]:
    """The same of passes that score: errors of the mass, and of the KV."""
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
        passed(layers, 0, None)
        expected = plain.plainly(rows, start)
        mass = layers.mass[:, :start]
        assert question is not None or not layers.mass.any()
        off = (mass - expected).abs().max() if question is not None and start else torch.zeros(())
        found[name] = float(off), difference(ours, plain)
    return found


if importlib.util.find_spec("triton"):

    @pytest.fixture(scope="module")
    def interpreted():
        return interpreted_results(__file__)

    @pytest.mark.parametrize("name", PASSES)
    def test_layers_over_tables_write_and_tally_what_plain_attention_does(interpreted, name):
        of_mass, of_pages = interpreted["scoring"][name]
        assert of_mass < 1e-4
        assert of_pages < 1e-4

    @pytest.mark.parametrize("name", RECOMPUTING)
    def test_layers_over_tables_write_and_move_what_plain_attention_and_the_twin_do(interpreted, name):
        assert interpreted["recomputing"][name] < 1e-4
        assert interpreted["recomputing"][f"{name}, layer by layer"] < 1e-4


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"scoring": interpret_the_passes(), "recomputing": interpret_recomputing()}))
