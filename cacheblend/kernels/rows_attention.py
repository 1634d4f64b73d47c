"""Attention of scattered rows over a paged cache."""

from __future__ import annotations

from typing import Any

import torch

from cacheblend.errors import BlendError
from cacheblend.kernels.layer_launch import Form, form_of
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.row_tiles import RowTiles
from cacheblend.kernels.rows_attention_torch import attend_rows_torch


def rows_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    row_requests: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    tiles: RowTiles | None = None,
) -> torch.Tensor:
    """Attend from each row to the positions 0 to its own of its request, whatever rows lie between.

    The keys and values of the rows themselves are already in the pages. Query head h reads kv head
    `h // (heads // kv_heads)`. Softmax and sums are float32. On CUDA a Triton kernel reads every key once for a tile of
    neighbouring rows; elsewhere plain PyTorch does the same.

    Args:
        query: [rows, heads, head_dim] float32, bfloat16 or float16; rows sorted by request and position; last stride 1.
        keys: [blocks, block_size, kv_heads, head_dim] of the query's dtype, any strides but a last one of 1
            (`PagedLayer` makes such views of vLLM's caches).
        values: as `keys`, with the same strides.
        block_tables: [requests, max_blocks] int32, contiguous within a row.
        row_requests: [rows] int32 or int64, indices into `block_tables`.
        positions: [rows] int32 or int64.
        scale: factor on the scores, above 0.
        tiles: the rows' division for the kernel. Make it once and pass it to every layer: without it each call fetches
            the rows from the device.

    Returns:
        [rows, heads, head_dim] contiguous, of the query's dtype.

    Raises:
        BlendError: shapes, dtypes or strides do not fit together, or `tiles` were made for other rows.
    """
    layer = PagedLayer(keys, values)
    _require_fitting(query, layer, block_tables, row_requests, positions, scale)
    if len(query) == 0:
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not query.is_cuda:
        return attend_rows_torch(query, layer, block_tables, row_requests, positions, scale)
    # Here, for triton is not installed where there is no GPU.
    from cacheblend.kernels.rows_attention_triton import RowsLaunches

    if tiles is None:
        tiles = RowTiles.of(
            row_requests,
            positions,
            heads=query.shape[1],
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            dtype=query.dtype,
            device=query.device,
        )
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    RowsLaunches(query, layer, block_tables, positions, scale, tiles)(query, layer, out)
    return out


class RowsAttentionPass:
    """`rows_attention` for all layers of one forward pass: what they share is checked, divided and allocated once.

    Args:
        block_tables: [requests, max_blocks] int32, contiguous within a row.
        row_requests: [rows] int32 or int64, indices into `block_tables`, on the device.
        positions: [rows] int32 or int64, on the device.
        row_requests_cpu: the same as `row_requests` on the host.
        positions_cpu: the same as `positions` on the host.
    """

    def __init__(
        self,
        block_tables: torch.Tensor,
        row_requests: torch.Tensor,
        positions: torch.Tensor,
        row_requests_cpu: torch.Tensor,
        positions_cpu: torch.Tensor,
    ) -> None:
        self._block_tables = block_tables
        self._row_requests = row_requests
        self._positions = positions
        self._on_host = (row_requests_cpu, positions_cpu)
        self._form: tuple[Form, float] | None = None
        self._launches: Any = None

    def attend(self, query: torch.Tensor, layer: PagedLayer, scale: float, out: torch.Tensor) -> None:
        """One layer's attention.

        Args:
            query: [rows, heads, head_dim].
            layer: its pages.
            scale: factor on the scores, above 0.
            out: [rows, heads, head_dim] contiguous, of the query's dtype; what is written.

        Raises:
            BlendError: see `rows_attention`.
        """
        if not query.is_cuda:
            rest = (self._block_tables, self._row_requests, self._positions, scale)
            out.copy_(rows_attention(query, layer.keys, layer.values, *rest))
            return
        form = form_of(query, layer.keys, layer.values, out), scale
        if form != self._form:
            self._launches = self._prepare(query, layer, scale, out)
            self._form = form
        self._launches(query, layer, out)

    def _prepare(self, query: torch.Tensor, layer: PagedLayer, scale: float, out: torch.Tensor) -> Any:
        """Check the first layer, and another that is unlike the one before, and make its launches ready."""
        # Here, for triton is not installed where there is no GPU.
        from cacheblend.kernels.rows_attention_triton import RowsLaunches

        _require_fitting(query, layer, self._block_tables, self._row_requests, self._positions, scale)
        if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
            raise BlendError(
                f"the output is {tuple(out.shape)} {out.dtype} with strides {out.stride()}: give the query's "
                f"{tuple(query.shape)} {query.dtype}, contiguous."
            )
        tiles = RowTiles.of(
            *self._on_host,
            heads=query.shape[1],
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            dtype=query.dtype,
            device=query.device,
        )
        return RowsLaunches(query, layer, self._block_tables, self._positions, scale, tiles)


def _require_fitting(
    query: torch.Tensor,
    layer: PagedLayer,
    block_tables: torch.Tensor,
    row_requests: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> None:
    if query.dim() != 3 or query.shape[2] != layer.head_dim or query.shape[1] % layer.kv_heads:
        raise BlendError(
            f"query {tuple(query.shape)} does not fit {layer.kv_heads} kv heads of {layer.head_dim}: "
            "give [rows, heads, head_dim] with heads a multiple of the kv heads."
        )
    if query.dtype != layer.keys.dtype or query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise BlendError(
            f"query is {query.dtype} and the cache {layer.keys.dtype}: give both as float32, bfloat16 or float16."
        )
    if query.stride(2) != 1:
        raise BlendError(f"the head dimension of query has stride {query.stride(2)}: make it contiguous.")
    if len(row_requests) != len(query) or len(positions) != len(query):
        raise BlendError(
            f"{len(row_requests)} row requests and {len(positions)} positions do not fit {len(query)} query rows: "
            "give one of each a row."
        )
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise BlendError(
            f"block tables are {tuple(block_tables.shape)} {block_tables.dtype} with strides {block_tables.stride()}: "
            "give [requests, max_blocks] int32 with contiguous rows."
        )
    if scale <= 0:
        raise BlendError(f"scale {scale} is not above 0: give the model's own factor on the scores.")
