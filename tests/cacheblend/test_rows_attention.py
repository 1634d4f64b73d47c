"""Attention of scattered rows over pages: the PyTorch twin, the tiles, the interpreted Triton kernel, and the mass."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import attention_mass_oracle as mass_module
from attention_mass_oracle import attention_with_mass
from rows_attention_samples import RowsCase, rows_case
from triton_interpreter import interpreted_results

from cacheblend.errors import BlendError
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.row_tiles import ASSUMED_PROCESSORS, BALANCE, MIN_PART_KEYS, RowTiles, TileConfig
from cacheblend.kernels.rows_attention import rows_attention
from cacheblend.reference.attention import attend_rows, attention_mass, row_blocks

LAYOUTS = ("stacked", "packed", "apart")


def by_definition(case: RowsCase) -> torch.Tensor:
    """One softmax for each row and head, over keys looked up one by one."""
    out = torch.empty(case.query.shape)
    group = case.query.shape[1] // case.layer.kv_heads
    for row, (request, position) in enumerate(zip(case.row_requests.tolist(), case.positions.tolist(), strict=True)):
        places = [divmod(p, case.layer.block_size) for p in range(position + 1)]
        table = case.block_tables[request].tolist()
        keys = torch.stack([case.layer.keys[table[block], slot] for block, slot in places]).float()
        values = torch.stack([case.layer.values[table[block], slot] for block, slot in places]).float()
        for head in range(case.query.shape[1]):
            scores = keys[:, head // group] @ case.query[row, head].float() * case.scale
            out[row, head] = scores.softmax(0) @ values[:, head // group]
    return out


positions_of_a_request = st.frozensets(st.integers(0, 150), max_size=8).map(sorted)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(positions_of_a_request, min_size=1, max_size=3),
    st.sampled_from([(2, 2), (4, 1), (6, 2), (8, 1)]),
    st.sampled_from([4, 16]),
    st.sampled_from(LAYOUTS),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_any_rows_of_any_requests_attend_as_one_softmax_each(rows, heads, block_size, layout, position_dtype):
    case = rows_case(
        rows, heads=heads[0], kv_heads=heads[1], block_size=block_size, layout=layout, position_dtype=position_dtype
    )
    got = rows_attention(*case.arguments())
    assert got.is_contiguous()
    assert torch.allclose(got, by_definition(case), atol=1e-5)


def test_rows_of_many_blocks_attend_as_the_reference_does():
    positions = sorted(random.Random(1).sample(range(900), 300))
    case = rows_case([positions])
    keys, values = case.layer.gather(case.block_tables[0], positions[-1] + 1)
    places = torch.tensor(positions)
    heads_first = (tensor.transpose(0, 1) for tensor in (case.query, keys, values))
    expected = attend_rows(*heads_first, row_blocks(places), case.scale)
    assert torch.allclose(rows_attention(*case.arguments()), expected.transpose(0, 1), atol=1e-5)


def test_a_request_attends_the_same_alone_and_beside_others():
    many = [sorted(random.Random(2).sample(range(400), 40)), [0, 7, 399]]
    case = rows_case(many)
    alone = RowsCase(
        case.query[:40],
        case.layer,
        case.block_tables[:1],
        case.row_requests[:40],
        case.positions[:40],
        case.scale,
    )
    assert torch.equal(rows_attention(*case.arguments())[:40], rows_attention(*alone.arguments()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_only_at_the_end(dtype):
    case = rows_case([[3, 50, 119]], dtype=dtype)
    got = rows_attention(*case.arguments())
    assert got.dtype == dtype
    assert torch.equal(got, by_definition(case).to(dtype)) or torch.allclose(
        got.float(), by_definition(case), atol=1e-5, rtol=2 * torch.finfo(dtype).eps
    )


def test_no_rows_give_no_output():
    case = rows_case([[]])
    assert rows_attention(*case.arguments()).shape == (0, 4, 16)


WRONG = {
    "heads a multiple": lambda q, k, v, t, r, p, s: (q[:, :3], k, v, t, r, p, s),
    "bfloat16": lambda q, k, v, t, r, p, s: (q.double(), k, v, t, r, p, s),
    "query has stride": lambda q, k, v, t, r, p, s: (q.new_zeros(q.shape[0], 16, 4).transpose(1, 2), k, v, t, r, p, s),
    "one of each a row": lambda q, k, v, t, r, p, s: (q, k, v, t, r, p[:1], s),
    "int32": lambda q, k, v, t, r, p, s: (q, k, v, t.long(), r, p, s),
    "above 0": lambda q, k, v, t, r, p, s: (q, k, v, t, r, p, 0.0),
    "views of one cache": lambda q, k, v, t, r, p, s: (q, k, v[:-1], t, r, p, s),
    "one dtype": lambda q, k, v, t, r, p, s: (q, k, v.half(), t, r, p, s),
    "equal strides": lambda q, k, v, t, r, p, s: (q, k, v.contiguous(), t, r, p, s),
    "last dimension is contiguous": lambda q, k, v, t, r, p, s: (
        q,
        k.transpose(2, 3).contiguous().transpose(2, 3),
        v,
        t,
        r,
        p,
        s,
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_together_is_refused_in_a_sentence(message):
    arguments = WRONG[message](*rows_case([[2, 5]]).arguments())
    with pytest.raises(BlendError, match=message):
        rows_attention(*arguments)


def tiles_of(rows, dtype_of_rows=torch.int64, **changes) -> RowTiles:
    """For 8 query heads and 2 kv heads."""
    owners = torch.tensor([request for request, places in enumerate(rows) for _ in places], dtype=dtype_of_rows)
    flat = torch.tensor([place for places in rows for place in places], dtype=dtype_of_rows)
    settings = {
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "config": TileConfig(32, 16, 4, 1),
    }
    return RowTiles.of(owners, flat, **{**settings, **changes})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 9000), max_size=40).map(sorted), min_size=1, max_size=4))
def test_tiles_cover_every_row_and_every_key_it_reaches_once(rows):
    tiles = tiles_of(rows)
    flat = [(request, place) for request, places in enumerate(rows) for place in places]
    covered: dict[int, list[tuple[int, int]]] = {}
    slots = []
    for first, count, request, begin, end, part in tiles.work.tolist():
        assert 1 <= count <= 8
        assert begin % 16 == 0
        assert begin < end
        for row in range(first, first + count):
            assert flat[row][0] == request
            covered.setdefault(row, []).append((begin, end))
        if part >= 0:
            slots.append(part)
    assert sorted(covered) == list(range(len(flat)))
    for row, ranges in covered.items():
        ranges.sort()
        assert [0, *(end for _, end in ranges[:-1])] == [begin for begin, _ in ranges]
        assert ranges[-1][1] > flat[row][1]
    assert sorted(slots) == list(range(tiles.parts))
    merged = [first + i for _, _, first, count in tiles.merges.tolist() for i in range(count)]
    assert sorted(merged) == list(range(tiles.parts))


def tables_by_definition(rows, tile_rows, kv_heads, config):
    """Work items and merges, one after another."""
    work, merges, parts, row = [], [], 0, 0
    for request, places in enumerate(rows):
        tiles = [places[at : at + tile_rows] for at in range(0, len(places), tile_rows)]
        share = sum(tile[-1] + 1 for tile in tiles) * kv_heads / (ASSUMED_PROCESSORS * config.resident)
        longest = -(-max(MIN_PART_KEYS, int(BALANCE * share)) // config.block_n) * config.block_n
        for tile in tiles:
            reach = tile[-1] + 1
            count, blocks = -(-reach // longest), -(-reach // config.block_n)
            begins = [blocks * part // count * config.block_n for part in range(count)]
            for part, (begin, end) in enumerate(zip(begins, [*begins[1:], reach], strict=True)):
                work.append([row, len(tile), request, begin, end, parts + part if count > 1 else -1])
            if count > 1:
                merges.append([row, len(tile), parts, count])
                parts += count
            row += len(tile)
    return sorted(work, key=lambda item: item[3] - item[4]), merges, parts


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.frozensets(st.integers(0, 20000), max_size=60).map(sorted), min_size=1, max_size=4),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([TileConfig(32, 16, 4, 1), TileConfig(16, 64, 4, 1, resident=2)]),
)
def test_tiles_are_cut_and_ordered_by_the_same_rule_however_many_there_are(rows, dtype, config):
    tiles = tiles_of(rows, dtype_of_rows=dtype, config=config)
    work, merges, parts = tables_by_definition(rows, config.block_m // 4, 2, config)
    assert (tiles.work.tolist(), tiles.merges.tolist(), tiles.parts) == (work, merges, parts)
    assert tiles.work.dtype is tiles.merges.dtype is torch.int32
    assert tiles.work.data_ptr() % 16 == 0, "the kernel is compiled for this"


def test_tiles_of_a_request_do_not_depend_on_the_batch():
    lonely = sorted(random.Random(3).sample(range(6000), 64))
    alone = tiles_of([lonely])
    beside = tiles_of([lonely, list(range(3000))])
    own = [item for item in beside.work.tolist() if item[2] == 0]
    assert alone.parts > 0
    assert sorted(item[:5] for item in alone.work.tolist()) == sorted(item[:5] for item in own)


def test_few_rows_of_a_long_context_are_cut_and_many_are_not():
    few = tiles_of([list(range(0, 6000, 600))], kv_heads=8, config=TileConfig(128, 128, 8, 3))
    many = tiles_of([list(range(0, 6000, 7))], heads=32, kv_heads=8, config=TileConfig(128, 128, 8, 3))
    assert few.parts > 8
    assert many.parts == 0
    lengths = [end - begin for _, _, _, begin, end, _ in many.work.tolist()]
    assert lengths == sorted(lengths, reverse=True)


def test_a_group_wider_than_a_tile_gets_a_wider_tile():
    tiles = tiles_of([[1, 2, 3]], heads=40, kv_heads=1, dtype=torch.float32, config=None)
    assert tiles.config.block_m == 64
    assert len(tiles.work) == 3


@pytest.mark.parametrize(
    ("owners", "places", "message"),
    [
        ([0, 0], [5, 4], "not sorted"),
        ([1, 0], [4, 5], "not sorted"),
        ([0, 0], [-1, 4], "negative"),
        ([0], [1, 2], "one of each"),
    ],
)
def test_rows_in_another_order_are_refused(owners, places, message):
    with pytest.raises(BlendError, match=message):
        RowTiles.of(
            torch.tensor(owners),
            torch.tensor(places),
            heads=4,
            kv_heads=2,
            head_dim=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(BlendError, match="multiple"):
        tiles_of([[1]], heads=5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_keys_are_those_of_the_prompts_own_blocks_in_order(layout):
    case = rows_case([[3], [40]], layout=layout, block_size=4)
    keys, values = case.layer.gather(case.block_tables[1], 41)
    for position in range(41):
        block = int(case.block_tables[1, position // 4])
        assert torch.equal(keys[position], case.layer.keys[block, position % 4])
        assert torch.equal(values[position], case.layer.values[block, position % 4])
    assert keys.is_contiguous()


def test_packed_and_stacked_views_share_the_caches_memory():
    for cache in (torch.zeros(3, 2, 8, 2, 4), torch.zeros(3, 2, 8, 8)):
        layer = (PagedLayer.stacked if cache.dim() == 5 else PagedLayer.packed)(cache)
        layer.keys[2, 5, 1] = 7
        layer.values[2, 5, 1] = 9
        assert layer.keys.shape == (3, 8, 2, 4)
        assert (cache == 7).sum() == (cache == 9).sum() == 4


@settings(max_examples=30, deadline=None)
@given(st.frozensets(st.integers(0, 299), min_size=1, max_size=30).map(sorted), st.sampled_from([None, 4 * 3 * 300]))
def test_mass_and_output_of_one_pass_are_the_references(positions, limit):
    generator = torch.Generator().manual_seed(len(positions))
    query, keys, values = (
        torch.randn(n, h, 8, generator=generator) for n, h in ((len(positions), 6), (300, 2), (300, 2))
    )
    places = torch.tensor(positions)
    with pytest.MonkeyPatch.context() as patch:
        if limit:
            patch.setattr(mass_module, "MAX_SCORE_BYTES", limit)
        out, mass = attention_with_mass(query, keys, values, places, 0.4)
    heads_first = [tensor.transpose(0, 1) for tensor in (query, keys, values)]
    assert torch.allclose(out, attend_rows(*heads_first, row_blocks(places), 0.4).transpose(0, 1), atol=1e-5)
    expected = attention_mass(heads_first[0], heads_first[1], places, 0.4)
    assert torch.allclose(mass[: len(expected)], expected, atol=1e-4)
    assert not mass[len(expected) :].any()
    assert mass.dtype == torch.float32
    assert float(mass.sum()) == pytest.approx(6 * len(positions), rel=1e-4)


def test_scores_of_half_precision_are_not_rounded_before_the_softmax():
    generator = torch.Generator().manual_seed(5)
    query, keys, values = (torch.randn(n, h, 64, generator=generator) * 3 for n, h in ((5, 4), (80, 2), (80, 2)))
    half = [tensor.bfloat16() for tensor in (query, keys, values)]
    places = torch.tensor([3, 10, 40, 41, 79])
    out, mass = attention_with_mass(*half, places, 0.125)
    _, exact = attention_with_mass(*(tensor.float() for tensor in half), places, 0.125)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(mass, exact, atol=1e-5)


def kernel_cases():
    """Small, for the interpreter is slow; each with its own block sizes, so that cuts and ragged ends are met."""
    generator = random.Random(11)

    def some(count, reach):
        return sorted(generator.sample(range(reach), count))

    return {
        "one row at the start": ({"rows": [[0]]}, None),
        "the whole prompt": ({"rows": [list(range(70))], "layout": "packed"}, None),
        "ragged requests": ({"rows": [some(9, 100), [], [129], some(5, 60)], "layout": "apart"}, None),
        "gaps between pages": ({"rows": [some(12, 200)], "block_size": 32, "layout": "packed"}, None),
        "block size no power of two": ({"rows": [some(12, 200)], "block_size": 24}, None),
        "one head each": ({"rows": [some(20, 90)], "heads": 2, "kv_heads": 2, "position_dtype": torch.int64}, None),
        "three heads share": ({"rows": [some(20, 90)], "heads": 6, "kv_heads": 2}, None),
        "eight heads share": ({"rows": [some(7, 150)], "heads": 8, "kv_heads": 1, "head_dim": 64}, None),
        "head size no power of two": ({"rows": [some(7, 90)], "head_dim": 24}, None),
        "cut along the keys": ({"rows": [some(6, 1300), some(3, 700)], "layout": "packed"}, TileConfig(16, 128, 4, 1)),
        "cut where a row sees nothing": ({"rows": [[3, 4, 1500]]}, TileConfig(16, 64, 4, 1)),
        # The interpreter multiplies bfloat16 as if its bits were integers: that dtype is checked on a GPU.
        "float16": ({"rows": [some(30, 300)], "dtype": torch.float16, "head_dim": 64}, TileConfig(64, 64, 4, 3)),
        "float16 cut": ({"rows": [some(5, 1200)], "dtype": torch.float16, "head_dim": 32}, TileConfig(32, 64, 4, 3)),
    }


def interpret_the_kernel() -> dict[str, float]:
    """Run in a process whose triton interprets: relative error of each case against the twin in float32."""
    from cacheblend.kernels.rows_attention_torch import attend_rows_torch
    from cacheblend.kernels.rows_attention_triton import RowsLaunches

    errors = {}
    for name, (arguments, config) in kernel_cases().items():
        case = rows_case(**arguments)
        tiles = RowTiles.of(case.row_requests, case.positions, **case.heads(), config=config)
        assert (tiles.parts > 0) == ("cut" in name), name
        launches = RowsLaunches(case.query, case.layer, case.block_tables, case.positions, case.scale, tiles)
        once, got = torch.full((2, *case.query.shape), torch.nan, dtype=case.query.dtype)
        launches(case.query, case.layer, once)
        launches(case.query, case.layer, got)
        assert torch.equal(once, got), name
        wide = PagedLayer(case.layer.keys.float(), case.layer.values.float())
        rest = (case.block_tables, case.row_requests, case.positions, case.scale)
        expected = attend_rows_torch(case.query.float(), wide, *rest)
        errors[name] = float((got.float() - expected).norm() / expected.norm())
    return errors


if importlib.util.find_spec("triton"):

    @pytest.fixture(scope="module")
    def interpreted():
        return interpreted_results(__file__)

    @pytest.mark.parametrize("name", kernel_cases())
    def test_the_kernel_equals_its_twin(interpreted, name):
        assert interpreted[name] < (1e-2 if "float16" in name else 1e-5)

    def test_tiles_of_another_pass_are_refused_before_they_are_launched():
        from cacheblend.kernels.rows_attention_triton import RowsLaunches

        case = rows_case([[2, 5, 30]])
        other = rows_case([[2, 5]])
        far = rows_case([[2, 5, 3000]])
        for wrong, message in ((other, "rows of this pass"), (far, "whole table")):
            tiles = RowTiles.of(wrong.row_requests, wrong.positions, **wrong.heads())
            with pytest.raises(BlendError, match=message):
                RowsLaunches(case.query, case.layer, case.block_tables, case.positions, case.scale, tiles)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpret_the_kernel()))
