"""Pages are read as they were written, in every layout a backend may have, or refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cacheblend.errors import BlendError
from cacheblend.vllm_backend.pages import LayerPages, PageLayout

BLOCKS, TOKENS, HEADS, DIM = 5, 4, 3, 8
ROWS = BLOCKS * TOKENS


class Backend:
    """An attention layer whose backend keeps element (kind, token, head, dim) of a block at `place` in it.

    Args:
        cache: blocks first.
        place: [2, tokens, heads, dim] int64 into a block's elements in the order of its dimensions.
        store: what a number becomes in the cache.
    """

    def __init__(self, cache, place, store=lambda numbers: numbers) -> None:
        self.cache = cache
        self.num_kv_heads, self.head_size = place.shape[2:]
        self.tokens = place.shape[1]
        self.impl = SimpleNamespace(do_kv_cache_update=self._update)
        self._place = place
        self._store = store

    def _update(self, attention, keys, values, cache, slots) -> None:
        assert attention is self
        assert keys.is_contiguous()
        assert values.is_contiguous()
        coordinates = torch.unravel_index(self._place, cache.shape[1:])
        for kind, numbers in enumerate((keys, values)):
            blocks = (slots // self.tokens)[:, None, None].expand(numbers.shape)
            inside = [axis[kind, slots % self.tokens] for axis in coordinates]
            cache[(blocks, *inside)] = self._store(numbers)

    def layout(self) -> PageLayout:
        return PageLayout(self, self.cache, self.tokens)


def _index(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def split(dtype, tokens=TOKENS, heads=HEADS, dim=DIM) -> Backend:
    """[blocks, 2, tokens, heads, dim]."""
    cache = torch.zeros(BLOCKS, 2, tokens, heads, dim, dtype=dtype)
    return Backend(cache, _index(2, tokens, heads, dim))


def side_by_side(dtype, tokens=TOKENS, heads=HEADS, dim=DIM) -> Backend:
    """[blocks, heads, tokens, 2 * dim]: a token's keys and values next to one another."""
    cache = torch.zeros(BLOCKS, heads, tokens, 2 * dim, dtype=dtype)
    return Backend(cache, _index(heads, tokens, 2, dim).permute(2, 1, 0, 3))


def heads_outside(dtype, tokens=TOKENS, heads=HEADS, dim=DIM) -> Backend:
    """[blocks, 2, tokens, heads, dim] over memory in which heads come before tokens."""
    cache = torch.zeros(BLOCKS, 2, heads, tokens, dim, dtype=dtype).permute(0, 1, 3, 2, 4)
    return Backend(cache, _index(2, tokens, heads, dim))


def two_planes(dtype, tokens=TOKENS, heads=HEADS, dim=DIM) -> Backend:
    """[blocks, 2, tokens, heads, dim] over memory in which all keys come before all values."""
    cache = torch.zeros(2, BLOCKS, tokens, heads, dim, dtype=dtype).transpose(0, 1)
    return Backend(cache, _index(2, tokens, heads, dim))


def within_a_buffer(dtype, tokens=TOKENS, heads=HEADS, dim=DIM) -> Backend:
    """[blocks, 2, tokens, heads, dim] that begins inside a buffer, with other things between the blocks."""
    page = 2 * tokens * heads * dim
    buffer = torch.zeros(7 + BLOCKS * (page + 5), dtype=dtype)
    cache = buffer.as_strided(
        (BLOCKS, 2, tokens, heads, dim), (page + 5, page // 2, heads * dim, dim, 1), storage_offset=7
    )
    return Backend(cache, _index(2, tokens, heads, dim))


def shuffled(dtype, tokens=TOKENS, heads=HEADS, dim=DIM) -> Backend:
    """[blocks, heads, tokens, 2 * dim] in an order that no strides describe."""
    cache = torch.zeros(BLOCKS, heads, tokens, 2 * dim, dtype=dtype)
    order = torch.randperm(cache[0].numel(), generator=torch.Generator().manual_seed(0))
    return Backend(cache, order.view(2, tokens, heads, dim))


def turned_keys(dtype, tokens=TOKENS, heads=HEADS, dim=DIM) -> Backend:
    """Keys with tokens innermost, as CPU kernels pack them; values as they are."""
    cache = torch.zeros(BLOCKS, 2, heads, tokens, dim, dtype=dtype)
    keys = _index(heads, dim, tokens).permute(2, 0, 1)
    values = keys.numel() + _index(heads, tokens, dim).permute(1, 0, 2)
    return Backend(cache, torch.stack([keys, values]))


STRIDED = [split, side_by_side, heads_outside, two_planes, within_a_buffer]
PACKED = [shuffled, turned_keys]
DTYPES = [torch.float32, torch.bfloat16]


def name_of(value) -> str:
    return value.__name__ if callable(value) else str(value)


@pytest.fixture(params=[*STRIDED, *PACKED], ids=name_of)
def make(request):
    return request.param


def random_kv(rows: int, dtype, heads=HEADS, dim=DIM, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, dim, generator=generator).to(dtype) for _ in range(2)]


def same(got, want) -> bool:
    return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_what_is_read_is_what_was_written(make, dtype):
    backend = make(dtype)
    pages = LayerPages(backend, backend.cache, backend.layout())
    keys, values = random_kv(ROWS, dtype)
    slots = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    pages.write(slots, keys, values)
    assert same(pages.read(slots), (keys, values))
    again = torch.tensor([3, 11, 11, 0, 19, 3])
    where = [int((slots == slot).nonzero()) for slot in again]
    assert same(pages.read(again), (keys[where], values[where]))


def test_writing_some_rows_leaves_the_others(make):
    backend = make(torch.float32)
    pages = LayerPages(backend, backend.cache, backend.layout())
    everything = torch.arange(ROWS)
    old, new = random_kv(ROWS, torch.float32), random_kv(3, torch.float32, seed=3)
    pages.write(everything, *old)
    slots = torch.tensor([2, 7, 18])
    pages.write(slots, *new)
    for numbers, replaced in zip(old, new, strict=True):
        numbers[slots] = replaced
    assert same(pages.read(everything), old)


def test_keys_that_are_not_contiguous_are_written_as_well(make):
    backend = make(torch.float32)
    pages = LayerPages(backend, backend.cache, backend.layout())
    keys, values = (numbers.transpose(0, 1).contiguous().transpose(0, 1) for numbers in random_kv(4, torch.float32))
    pages.write(torch.arange(4), keys, values)
    assert same(pages.read(torch.arange(4)), (keys, values))


@pytest.mark.parametrize("strided", STRIDED, ids=name_of)
def test_views_are_the_caches_own_memory(strided):
    backend = strided(torch.float32)
    pages = LayerPages(backend, backend.cache, backend.layout())
    keys, values = random_kv(ROWS, torch.float32)
    pages.write(torch.arange(ROWS), keys, values)
    assert pages.views is not None
    for view, numbers in zip(pages.views, (keys, values), strict=True):
        assert view.shape == (BLOCKS, TOKENS, HEADS, DIM)
        assert view.stride(3) == 1
        assert torch.equal(view.reshape(ROWS, HEADS, DIM), numbers)
    pages.views[0][3, 2] = 7.0
    pages.views[1][1, 0] = -7.0
    keys[3 * TOKENS + 2], values[TOKENS] = 7.0, -7.0
    assert same(pages.read(torch.arange(ROWS)), (keys, values))
    assert int((backend.cache == 7.0).sum()) == int((backend.cache == -7.0).sum()) == HEADS * DIM


@pytest.mark.parametrize("packed", PACKED, ids=name_of)
def test_a_layout_that_strides_do_not_describe_has_no_views(packed):
    backend = packed(torch.float32)
    assert LayerPages(backend, backend.cache, backend.layout()).views is None


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_learning_leaves_every_block_as_it_was(make, dtype):
    backend = make(dtype)
    LayerPages(backend, backend.cache, backend.layout()).write(torch.arange(ROWS), *random_kv(ROWS, dtype))
    before = backend.cache.clone()
    backend.layout()
    assert torch.equal(backend.cache, before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=name_of)
@pytest.mark.parametrize("shape", [(128, 2, 64), (1, 1, 8), (16, 1, 32), (1, 4, 8)], ids=str)
def test_blocks_of_any_size_are_learned(make, shape, dtype):
    """The first one has more elements than two digits of a ramp can count."""
    backend = make(dtype, *shape)
    tokens, heads, dim = shape
    pages = LayerPages(backend, backend.cache, backend.layout())
    written = random_kv(BLOCKS * tokens, dtype, heads, dim)
    pages.write(torch.arange(BLOCKS * tokens), *written)
    assert same(pages.read(torch.arange(BLOCKS * tokens)), written)


@pytest.mark.parametrize(
    "store",
    [lambda x: x / 2, lambda x: (x / 2).round() * 2, lambda x: x.clamp(max=100), lambda x: x * 0],
    ids=["scaled", "rounded", "clamped", "dropped"],
)
def test_a_cache_that_does_not_keep_numbers_as_they_are_is_refused_and_left_as_it_was(store):
    cache = torch.full((BLOCKS, 2, TOKENS, HEADS, DIM), 5.0)
    backend = Backend(cache, _index(2, TOKENS, HEADS, DIM), store)
    with pytest.raises(BlendError, match="quantised"):
        backend.layout()
    assert torch.equal(cache, torch.full_like(cache, 5.0))


def test_pages_with_padding_are_refused_with_both_sizes():
    backend = Backend(torch.zeros(BLOCKS, 2, TOKENS, HEADS, DIM + 2), _index(2, TOKENS, HEADS, DIM + 2)[..., :DIM])
    with pytest.raises(BlendError, match="has 240 elements, but 4 tokens have 192"):
        backend.layout()
