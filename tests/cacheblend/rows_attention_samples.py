"""Scattered rows of several prompts over a paged cache whose unused places hold NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend.kernels.pages import PagedLayer


@dataclass(frozen=True)
class RowsCase:
    """What `rows_attention` is called with."""

    query: torch.Tensor
    layer: PagedLayer
    block_tables: torch.Tensor
    row_requests: torch.Tensor
    positions: torch.Tensor
    scale: float

    def arguments(self) -> tuple:
        """In the order of `rows_attention`."""
        rest = (self.block_tables, self.row_requests, self.positions, self.scale)
        return (self.query, self.layer.keys, self.layer.values, *rest)

    def heads(self) -> dict:
        """What `RowTiles.of` wants to know beside the rows."""
        return {
            "heads": self.query.shape[1],
            "kv_heads": self.layer.kv_heads,
            "head_dim": self.layer.head_dim,
            "dtype": self.query.dtype,
            "device": self.query.device,
        }


def rows_case(
    rows: Sequence[Sequence[int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    layout: str = "stacked",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    position_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> RowsCase:
    """Random queries, keys and values for these positions of each request.

    Every request holds one key more than its last row reaches; all else in the cache is NaN, as are the queries' gaps.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lengths = [max(places) + 2 if len(places) else 1 for places in rows]
    per_request = [-(-length // block_size) for length in lengths]
    blocks = sum(per_request) + 3
    layer = empty_pages(layout, blocks, block_size, kv_heads, head_dim, dtype, device)
    shuffled = torch.randperm(blocks, generator=generator, device=device).to(torch.int32)
    tables = torch.full((len(rows), max(per_request) + 2), blocks - 1, dtype=torch.int32, device=device)
    first = 0
    for request, (length, count) in enumerate(zip(lengths, per_request, strict=True)):
        own = shuffled[first : first + count]
        first += count
        tables[request, :count] = own
        at = torch.arange(length, device=device)
        index = (own.long()[at // block_size], at % block_size)
        for pages in (layer.keys, layer.values):
            fresh = torch.randn(length, kv_heads, head_dim, generator=generator, device=device)
            pages[index] = fresh.to(dtype)
    flat = [place for places in rows for place in places]
    owners = [request for request, places in enumerate(rows) for _ in places]
    # As a model hands it over: a view into the fused projection's output.
    fused = torch.full((len(flat), heads + 2 * kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    query = fused[:, :heads]
    query.copy_(torch.randn(query.shape, generator=generator, device=device) * 1.5)
    return RowsCase(
        query,
        layer,
        tables,
        torch.tensor(owners, dtype=torch.int32, device=device),
        torch.tensor(flat, dtype=position_dtype, device=device),
        head_dim**-0.5,
    )


def empty_pages(
    layout: str, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> PagedLayer:
    """A cache of NaN in one of vLLM's layouts, or with keys and values apart."""
    of = {"fill_value": torch.nan, "dtype": dtype, "device": device}
    if layout == "stacked":
        return PagedLayer.stacked(torch.full((blocks, 2, block_size, kv_heads, head_dim), **of))
    if layout == "packed":
        return PagedLayer.packed(torch.full((blocks, kv_heads, block_size, 2 * head_dim), **of))
    keys, values = (torch.full((blocks, kv_heads, block_size, head_dim), **of).transpose(1, 2) for _ in range(2))
    return PagedLayer(keys, values)
