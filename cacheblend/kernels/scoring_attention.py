"""Attention of a question over a paged context and its own keys, tallying what it pays to each key of the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheblend.errors import BlendError
from cacheblend.kernels.host_tables import on_device
from cacheblend.kernels.layer_launch import Form, form_of
from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.row_tiles import TileConfig, processors, tile_config
from cacheblend.kernels.scoring_attention_torch import score_attention_torch

PART_OVERHEAD_BLOCKS = 4
"""What starting a part and leaving its partial result costs, in blocks of keys."""
MOST_PARTS = 32


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """Sizes of one question's scoring, and the kernels' division of it: checked and chosen once for every layer.

    The division depends on the question and the device alone, never on what else is in the batch.

    Attributes:
        rows: query rows, the last of the question's rows so far.
        own: rows of the question so far; the query's own keys and values.
        context: keys in the pages.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`.
        head_dim: elements of a head.
        dtype: of queries, keys and values.
        attend: block sizes of the attention.
        tally: block sizes of the tally, where `block_m` counts keys and `block_n` query vectors.
        parts: ranges into which the keys of a tile are cut, so that the device has work for all its processors.
    """

    rows: int
    own: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    attend: TileConfig
    tally: TileConfig
    parts: int

    @classmethod
    def of(
        cls,
        *,
        rows: int,
        own: int,
        context: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ScoringPlan:
        """Check the sizes and choose the division; nothing is copied to the device.

        Args:
            rows: query rows.
            own: own keys, at least `rows`.
            context: keys in the pages, 0 or more.
            heads: query heads.
            kv_heads: key/value heads.
            head_dim: elements of a head.
            dtype: of queries, keys and values: float32, bfloat16 or float16.
            device: where the layers will run.

        Raises:
            BlendError: sizes contradict each other, or the dtype or head size is none that the kernels take.
        """
        if kv_heads < 1 or heads % kv_heads:
            raise BlendError(f"{heads} query heads cannot share {kv_heads} kv heads: the first must be a multiple.")
        if not 0 <= rows <= own or context < 0:
            raise BlendError(
                f"{rows} query rows of {own} own keys behind {context} keys in pages make no question: "
                "give the own keys and values of all its rows so far, the query's last."
            )
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise BlendError(f"{dtype} cannot be scored: give query, keys and values as float32, bfloat16 or float16.")
        group = heads // kv_heads
        # Vectors are packed across rows: a tile needs no room for a whole group.
        attend = tile_config(dtype, head_dim, 1, device)
        tiles = -(-rows * group // attend.block_m)
        context_blocks = -(-context // attend.block_n)
        blocks = context_blocks + -(-own // attend.block_n)
        return cls(
            rows=rows,
            own=own,
            context=context,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            attend=attend,
            tally=_tally_config(attend),
            # Every tile reaches one block of its own keys at least: no part of any is empty.
            parts=_parts(tiles * kv_heads, blocks, processors(device) * attend.resident, context_blocks + 1),
        )

    @property
    def vectors(self) -> int:
        """Query vectors of one kv head: rows times the query heads that share it."""
        return self.rows * (self.heads // self.kv_heads)

    def sizes(self, first_row: int = 0) -> tuple[int, int, int, int, int]:
        """[5] int32, what the kernels read of a question.

        Args:
            first_row: index of its first row in the tensors that it is read from and written to.

        Returns:
            `first_row`, then `rows`, `own`, `context` and `parts`.
        """
        return first_row, self.rows, self.own, self.context, self.parts

    @property
    def query_shape(self) -> tuple[int, int, int]:
        """Of the query and the output."""
        return self.rows, self.heads, self.head_dim

    @property
    def own_shape(self) -> tuple[int, int, int]:
        """Of the own keys and values."""
        return self.own, self.kv_heads, self.head_dim


class ScoringRoom(NamedTuple):
    """The most that launches are made for.

    Attributes:
        vectors: query vectors of one kv head.
        partial: query vectors times parts: partial results of one kv head.
        programs: tiles of query vectors times parts: programs of one kv head that attend.
        context: keys in the pages.
    """

    vectors: int
    partial: int
    programs: int
    context: int

    @classmethod
    def of(cls, plan: ScoringPlan) -> ScoringRoom:
        """Room for one question alone."""
        tiles = -(-plan.vectors // plan.attend.block_m)
        return cls(plan.vectors, plan.vectors * plan.parts, tiles * plan.parts, plan.context)

    def holds(self, plan: ScoringPlan) -> bool:
        """Whether a question fits."""
        return all(own <= most for own, most in zip(ScoringRoom.of(plan), self, strict=True))


def _tally_config(attend: TileConfig) -> TileConfig:
    """Keys stay in a program while query vectors stream through it: the mirror image of attention.

    Queries are found without a block table, which takes every second stage there.
    """
    return TileConfig(attend.block_m, attend.block_n, 4, (attend.num_stages + 1) // 2)


def _parts(programs: int, blocks: int, resident: int, most: int) -> int:
    """The number of parts, up to `most`, with the least time in blocks of keys one after another on one processor."""
    # All at once: the device waits for this.
    parts = np.arange(1, min(most, MOST_PARTS) + 1)
    took = -(-programs * parts // resident) * (-(-blocks // parts) + PART_OVERHEAD_BLOCKS)
    return int(took.argmin()) + 1


class ScoringPass:
    """`scoring_attention` for all layers of one forward pass: what they share is checked and made ready once.

    Args:
        block_table: [max_blocks] int32 contiguous, the blocks of the context in order.
        mass: see `scoring_attention`; layers add to it.
        plan: made for the question's sizes.
    """

    def __init__(self, block_table: torch.Tensor, mass: torch.Tensor, plan: ScoringPlan) -> None:
        self._block_table = block_table
        self._mass = mass
        self._plan = plan
        self._form: tuple[Form, float] | None = None
        self._launches: Any = None

    def attend(
        self,
        query: torch.Tensor,
        own_keys: torch.Tensor,
        own_values: torch.Tensor,
        layer: PagedLayer,
        scale: float,
        out: torch.Tensor,
        tally: bool = True,
    ) -> None:
        """One layer; see `scoring_attention` for the tensors.

        Args:
            query: [rows, heads, head_dim].
            own_keys: [own, kv_heads, head_dim].
            own_values: as `own_keys`.
            layer: its pages.
            scale: factor on the scores, above 0.
            out: [rows, heads, head_dim] contiguous, of the query's dtype; what is written.
            tally: whether this layer adds to the mass.

        Raises:
            BlendError: the tensors are not what the plan was made for.
        """
        # A kernel that is handed less than its plan says reads beyond it: a layer unlike the one before is checked.
        form = form_of(query, own_keys, own_values, layer.keys, layer.values, out), scale
        if form != self._form:
            rest = (layer, self._block_table, scale, self._mass, self._plan)
            _require_planned(query, own_keys, own_values, *rest, out)
            if query.is_cuda and self._plan.rows:
                # Here, for triton is not installed where there is no GPU.
                from cacheblend.kernels.scoring_attention_triton import ScoringLaunches

                sizes = on_device(torch.tensor(self._plan.sizes(), dtype=torch.int32), query.device)
                self._launches = ScoringLaunches(query, own_keys, own_values, *rest, sizes)
            self._form = form
        if self._launches is not None:
            self._launches(query, own_keys, own_values, layer, out, tally)
        elif self._plan.rows:
            mass = self._mass if tally else torch.zeros_like(self._mass)
            of_pages = (layer, self._block_table, scale, mass)
            out.copy_(score_attention_torch(query, own_keys, own_values, *of_pages))


def scoring_attention(
    query: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    layer: PagedLayer,
    block_table: torch.Tensor,
    scale: float,
    mass: torch.Tensor,
    plan: ScoringPlan,
) -> torch.Tensor:
    """Attend from a question's rows, and add to `mass` what they pay to each key of the context.

    Every row sees all of the context in the pages; row i also sees the own keys 0 to `own - rows + i`, which are in no
    page. Query head h reads kv head `h // (heads // kv_heads)`. Softmax and sums are float32, and weights are tallied
    before they are rounded. A repeated call gives the same bits. On CUDA three Triton kernels do it; elsewhere plain
    PyTorch does the same.

    Args:
        query: [rows, heads, head_dim], rotated; last stride 1.
        own_keys: [own, kv_heads, head_dim] of the query's dtype, rotated; last stride 1.
        own_values: as `own_keys`.
        layer: paged keys and values, of the query's dtype.
        block_table: [max_blocks] int32 contiguous, the blocks of the context in order.
        scale: factor on the scores, above 0.
        mass: [kv_heads, context] float32, last stride 1; is added to in place: the softmax weights of a key summed
            over the rows and over the query heads of a kv head.
        plan: made for these sizes.

    Returns:
        [rows, heads, head_dim] contiguous, of the query's dtype.

    Raises:
        BlendError: the tensors are not what the plan was made for.
    """
    out = torch.empty(plan.query_shape, dtype=query.dtype, device=query.device)
    ScoringPass(block_table, mass, plan).attend(query, own_keys, own_values, layer, scale, out)
    return out


def _require_planned(
    query: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    layer: PagedLayer,
    block_table: torch.Tensor,
    scale: float,
    mass: torch.Tensor,
    plan: ScoringPlan,
    out: torch.Tensor,
) -> None:
    if query.shape != plan.query_shape or own_keys.shape != plan.own_shape or own_values.shape != plan.own_shape:
        raise BlendError(
            f"query {tuple(query.shape)}, own keys {tuple(own_keys.shape)} and own values {tuple(own_values.shape)} "
            f"do not fit a plan for {plan.query_shape} and {plan.own_shape}: make the plan from this question's rows."
        )
    if not query.dtype == own_keys.dtype == own_values.dtype == layer.keys.dtype == plan.dtype:
        raise BlendError(
            f"query is {query.dtype}, own keys {own_keys.dtype}, own values {own_values.dtype} and the cache "
            f"{layer.keys.dtype}: give all as the plan's {plan.dtype}."
        )
    if query.stride(2) != 1 or own_keys.stride(2) != 1 or own_values.stride(2) != 1:
        raise BlendError("the head dimension of query, own keys or own values has gaps: make it contiguous.")
    if layer.keys.shape[2:] != (plan.kv_heads, plan.head_dim):
        raise BlendError(
            f"pages of {layer.kv_heads} kv heads of {layer.head_dim} do not fit a plan for {plan.kv_heads} of "
            f"{plan.head_dim}: make the plan from this model's heads."
        )
    if block_table.dim() != 1 or block_table.dtype != torch.int32 or block_table.stride(0) != 1:
        raise BlendError(
            f"the block table is {tuple(block_table.shape)} {block_table.dtype} with strides {block_table.stride()}: "
            "give [max_blocks] int32, contiguous."
        )
    if len(block_table) * layer.block_size < plan.context:
        raise BlendError(
            f"a context of {plan.context} keys does not fit {len(block_table)} blocks of {layer.block_size}: "
            "give the prompt's whole table."
        )
    if mass.shape != (plan.kv_heads, plan.context) or mass.dtype != torch.float32 or mass.stride(1) != 1:
        raise BlendError(
            f"mass is {tuple(mass.shape)} {mass.dtype} with strides {mass.stride()}: give "
            f"[{plan.kv_heads}, {plan.context}] float32 with contiguous rows."
        )
    if out.shape != plan.query_shape or out.dtype != plan.dtype or not out.is_contiguous():
        raise BlendError(
            f"the output is {tuple(out.shape)} {out.dtype} with strides {out.stride()}: give {plan.query_shape} "
            f"{plan.dtype}, contiguous."
        )
    if scale <= 0:
        raise BlendError(f"scale {scale} is not above 0: give the model's own factor on the scores.")
