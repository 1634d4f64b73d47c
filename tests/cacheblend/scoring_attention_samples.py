"""Random questions behind paged contexts for tests of the scoring attention, on any device, and their exact answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rows_attention_samples import empty_pages

from cacheblend.kernels.pages import PagedLayer
from cacheblend.kernels.scoring_attention import ScoringPlan


@dataclass(frozen=True)
class ScoringCase:
    """What `scoring_attention` is called with, but for the mass."""

    query: torch.Tensor
    own_keys: torch.Tensor
    own_values: torch.Tensor
    layer: PagedLayer
    block_table: torch.Tensor
    scale: float
    plan: ScoringPlan

    def arguments(self, mass: torch.Tensor, plan: ScoringPlan | None = None) -> tuple:
        """In the order of `scoring_attention`."""
        tensors = (self.query, self.own_keys, self.own_values, self.layer, self.block_table)
        return (*tensors, self.scale, mass, plan or self.plan)

    def no_mass(self) -> torch.Tensor:
        """A tally to start with."""
        return torch.zeros(self.plan.kv_heads, self.plan.context, device=self.query.device)

    def all_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the context and the question, each [context + own, kv_heads, head_dim]."""
        keys, values = self.layer.gather(self.block_table, self.plan.context)
        return torch.cat([keys, self.own_keys]), torch.cat([values, self.own_values])

    def positions(self) -> torch.Tensor:
        """[rows] int64 of the query."""
        end = self.plan.context + self.plan.own
        return torch.arange(end - self.plan.rows, end, device=self.query.device)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [rows, heads, head_dim] and mass [kv_heads, context], all in float64 from the numbers given."""
        keys, values = (tensor.double() for tensor in self.all_keys())
        kv_heads, context = self.plan.kv_heads, self.plan.context
        hidden = torch.arange(len(keys), device=keys.device) > self.positions()[:, None]
        group = self.plan.heads // kv_heads
        out = torch.empty(self.query.shape, dtype=torch.float64, device=keys.device)
        mass = torch.zeros(kv_heads, context, dtype=torch.float64, device=keys.device)
        for head in range(self.plan.heads):
            scores = self.query[:, head].double() @ keys[:, head // group].T * self.scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[:, head] = weights @ values[:, head // group]
            mass[head // group] += weights[:, :context].sum(0)
        return out, mass


def worst_row(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the worst row; NaN if there is one."""
    apart = (got.double() - expected).flatten(1).norm(dim=1) / expected.double().flatten(1).norm(dim=1)
    return float(apart.max())


def mass_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error of a key's mass, masses below a ten-thousandth of the mean counted as that; NaN if any."""
    if not got.numel():
        return 0.0
    return float(((got.double() - expected).abs() / expected.clamp(min=1e-4 * float(expected.mean()))).max())


def scoring_case(
    rows: int,
    context: int,
    own: int | None = None,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    layout: str = "stacked",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    sharpness: float = 1.5,
    seed: int = 0,
) -> ScoringCase:
    """Random queries, keys and values; all else in the cache and around the question's rows is NaN.

    Queries, own keys and own values are views into one tensor, as a model hands them over.
    """
    own = rows if own is None else own
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    used = -(-context // block_size)
    layer = empty_pages(layout, used + 3, block_size, kv_heads, head_dim, dtype, device)
    table = torch.full((used + 2,), used + 2, dtype=torch.int32, device=device)
    table[:used] = torch.randperm(used + 3, generator=generator, device=device)[:used].to(torch.int32)
    at = torch.arange(context, device=device)
    index = (table.long()[at // block_size], at % block_size)
    for pages in (layer.keys, layer.values):
        pages[index] = random(context, kv_heads, head_dim).to(dtype)
    fused = torch.full((own + 40, heads + 2 * kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    fused[:own, heads:] = random(own, 2 * kv_heads, head_dim).to(dtype)
    fused[own - rows : own, :heads] = (random(rows, heads, head_dim) * sharpness).to(dtype)
    plan = ScoringPlan.of(
        rows=rows,
        own=own,
        context=context,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device(device),
    )
    return ScoringCase(
        fused[own - rows : own, :heads],
        fused[:own, heads : heads + kv_heads],
        fused[:own, heads + kv_heads :],
        layer,
        table,
        head_dim**-0.5,
        plan,
    )
