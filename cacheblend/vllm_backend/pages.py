"""Reading and writing a layer's paged KV, whatever the attention backend's layout is.

Written only through the backend's own `do_kv_cache_update`. vLLM has no way to read pages, so the layout is learned
once: ramps of numbers are written to block 0, which vLLM keeps unused, and looked for. A layout that turns out to be
plain strides is then read (and handed to kernels) as a view; a packed one is read through the permutation found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cacheblend.errors import BlendError
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.place_rows import LayersPages

_DIGIT = 128
"""Base of the ramps' digits: every float dtype holds whole numbers below it exactly."""


class PageLayout:
    """Where the elements of a block's keys and values lie in the cache tensor.

    Args:
        attention: one of the model's attention layers.
        cache: its KV cache, blocks first.
        block_size: tokens of a block.

    Raises:
        BlendError: if a write is not a plain permutation of the elements (a quantised cache, padded pages).
    """

    def __init__(self, attention: Any, cache: torch.Tensor, block_size: int) -> None:
        self.block_size = block_size
        self.kv_heads: int = attention.num_kv_heads
        self.head_dim: int = attention.head_size
        self._shape = (2, block_size, self.kv_heads, self.head_dim)
        if cache[0].numel() != 2 * block_size * self.kv_heads * self.head_dim:
            raise BlendError(
                f"A page of the KV cache has {cache[0].numel()} elements, but {block_size} tokens have "
                f"{2 * block_size * self.kv_heads * self.head_dim}; this page layout is not supported."
            )
        self.permutation = self._learn(attention, cache)
        self.strides = self._as_strides(cache)

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(keys, values), each [blocks, block_size, kv_heads, head_dim] over the cache's own memory; None if packed."""
        if self.strides is None:
            return None
        shape = (cache.shape[0], self.block_size, self.kv_heads, self.head_dim)
        (key_base, value_base), inner = self.strides
        stride = (cache.stride(0), *inner)
        first = cache.storage_offset()
        return cache.as_strided(shape, stride, first + key_base), cache.as_strided(shape, stride, first + value_base)

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots` ([n] int64), each [n, kv_heads, head_dim]."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        views = self.views(cache)
        if views is not None:
            return views[0][blocks, offsets], views[1][blocks, offsets]
        distinct, where = torch.unique(blocks, return_inverse=True)
        raw = (
            cache[distinct]
            .reshape(len(distinct), cache[0].numel())[:, self.permutation]
            .view(len(distinct), *self._shape)
        )
        return raw[where, 0, offsets], raw[where, 1, offsets]

    def _learn(self, attention: Any, cache: torch.Tensor) -> torch.Tensor:
        """[2 * block_size * kv_heads * head_dim] int64: for each element in logical order, its place in the block."""
        saved = cache[0].clone()
        count = cache[0].numel()
        index = torch.arange(count, device=cache.device)
        slots = torch.arange(self.block_size, device=cache.device)
        found = torch.zeros(count, dtype=torch.int64, device=cache.device)
        weight = 1
        while weight <= count:
            digits = (index // weight % _DIGIT).to(cache.dtype).view(self._shape)
            attention.impl.do_kv_cache_update(attention, digits[0].contiguous(), digits[1].contiguous(), cache, slots)
            found += cache[0].reshape(-1).to(torch.int64) * weight
            weight *= _DIGIT
        cache[0].copy_(saved)
        if not torch.equal(found.sort().values, index):
            raise BlendError("The KV cache does not hold keys and values as they are written; is it quantised?")
        return found.argsort()

    def _as_strides(self, cache: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int, int]] | None:
        """((keys' base, values' base), strides of token, head, element) in the block's memory, if that describes it."""
        offsets = torch.zeros(cache.shape[1:], dtype=torch.int64)
        for axis, stride in enumerate(cache.stride()[1:]):
            steps = torch.arange(cache.shape[1 + axis]) * stride
            offsets += steps.view([-1 if a == axis else 1 for a in range(offsets.dim())])
        where = offsets.reshape(-1)[self.permutation.cpu()].view(self._shape)
        base = (int(where[0, 0, 0, 0]), int(where[1, 0, 0, 0]))
        inner = tuple(
            int(where[0].select(axis, 1).reshape(-1)[0]) - base[0] if where.shape[1 + axis] > 1 else 1
            for axis in range(3)
        )
        token, head, element = (torch.arange(size) * step for size, step in zip(where.shape[1:], inner, strict=True))
        plain = token[:, None, None] + head[None, :, None] + element[None, None, :]
        if inner[2] != 1 or not all(torch.equal(where[kind], base[kind] + plain) for kind in (0, 1)):
            return None
        return base, (inner[0], inner[1], inner[2])


class LayerPages:
    """One attention layer's pages.

    Args:
        attention: the layer.
        cache: its KV cache.
        layout: of the cache, the same for all layers of a model.

    Attributes:
        views: see `PageLayout.views`.
        paged: the same as kernels take it; None if packed.
    """

    def __init__(self, attention: Any, cache: torch.Tensor, layout: PageLayout) -> None:
        self._attention = attention
        self._cache = cache
        self._layout = layout
        self.views = layout.views(cache)
        self.paged = None if self.views is None else PagedLayer(*self.views)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write `keys` and `values` ([n, kv_heads, head_dim], keys rotated) to `slots` ([n] int64).

        Rows may lie apart, as they do in the output of a projection that makes queries, keys and values at once.
        """
        keys, values = _heads_together(keys), _heads_together(values)
        self._attention.impl.do_kv_cache_update(self._attention, keys, values, self._cache, slots)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (rotated) and values at `slots` ([n] int64), each [n, kv_heads, head_dim]."""
        return self._layout.read(self._cache, slots)


def layers_pages(pages: Sequence[LayerPages]) -> LayersPages:
    """All layers' pages as the kernel takes them.

    Args:
        pages: of each layer, strided views.
    """
    views = [page.views for page in pages]
    assert views[0] is not None
    keys, values = views[0]
    starts = [view[0].data_ptr() for view in views if view is not None]
    offsets = [(start - starts[0]) // keys.element_size() for start in starts]
    return LayersPages(keys, values, torch.tensor(offsets, device=keys.device))


def _heads_together(rows: torch.Tensor) -> torch.Tensor:
    """The same [n, kv_heads, head_dim] with the heads of a row one after another, as the engine's kernels take it."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()
