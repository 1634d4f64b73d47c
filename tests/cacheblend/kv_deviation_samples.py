"""Random new keys and values over a paged cache, on any device, and how far they are from what it holds."""

from __future__ import annotations

import torch
from rows_attention_samples import empty_pages

from cacheblend.kernels.pages import PagedLayer

Case = tuple[torch.Tensor, torch.Tensor, PagedLayer, torch.Tensor]


def deviation_case(
    rows: int = 13,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 8,
    layout: str = "stacked",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Normalised keys, values as a projection leaves them, and pages in which only their slots are filled."""
    g = torch.Generator().manual_seed(rows)
    blocks = 3 + rows // block_size * 2
    layer = empty_pages(layout, blocks, block_size, kv_heads, head_dim, dtype, device)
    slots = torch.randperm(blocks * block_size, generator=g)[:rows].to(device)
    for pages in (layer.keys, layer.values):
        stored = torch.randn(rows, kv_heads, head_dim, generator=g).to(device, dtype)
        pages[slots // block_size, slots % block_size] = stored
    width = kv_heads * head_dim
    projected = torch.randn(rows, 5 * width, generator=g).to(device, dtype)
    keys, values = (
        projected[:, first * width : (first + 1) * width].view(rows, kv_heads, head_dim) for first in (3, 4)
    )
    return keys.contiguous(), values, layer, slots


def by_definition(keys: torch.Tensor, values: torch.Tensor, layer: PagedLayer, slots: torch.Tensor) -> torch.Tensor:
    """One row after another, in float64."""
    found = torch.zeros(len(slots), dtype=torch.float64, device=keys.device)
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, layer.block_size)
        for new, pages in ((keys, layer.keys), (values, layer.values)):
            found[row] += (new[row].double() - pages[block, offset].double()).square().sum()
    return found
