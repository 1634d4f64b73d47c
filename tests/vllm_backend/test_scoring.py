"""The scoring pass: what a question pays to the rows before it, in one piece or in many, over plain or packed pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from cacheblend.kernels.pages import PagedLayer
from cacheblend.vllm_backend.attention import LayerRows
from cacheblend.vllm_backend.rows import PromptPages, PromptRows, RowBatch, slices
from cacheblend.vllm_backend.scoring import QuestionTally, ScoringAttention

CPU = torch.device("cpu")
BLOCK, CONTEXT, QUESTION, HEADS, KV_HEADS, DIM, LAYERS = 4, 22, 9, 4, 2, 8, 2
FRESH = (0, 1, 2, 11)
SCALE = 0.3


class Prompt:
    """A prompt's pages of two layers, and the queries, keys and values of its fresh rows and its question."""

    def __init__(self, seed: int, packed: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        count = -(-CONTEXT // BLOCK)
        blocks = torch.randperm(count + 3, generator=g)[:count]
        self.pages = PromptPages((0,) * (CONTEXT + QUESTION), blocks, BLOCK)
        self.kv = torch.randn(LAYERS, 2, count + 3, BLOCK, KV_HEADS, DIM, generator=g)
        positions = torch.tensor([*FRESH, *range(CONTEXT, CONTEXT + QUESTION)])
        self.rows = PromptRows(self.pages, positions, positions < CONTEXT)
        self.query = torch.randn(LAYERS, len(positions), HEADS, DIM, generator=g)
        self.key, self.value = torch.randn(2, LAYERS, len(positions), KV_HEADS, DIM, generator=g)
        self.layers: list[Any] = [
            SimpleNamespace(paged=None if packed else PagedLayer(*kv), read=self._reader(kv)) for kv in self.kv
        ]

    @staticmethod
    def _reader(kv: torch.Tensor) -> Any:
        return lambda slots: tuple(part[slots // BLOCK, slots % BLOCK] for part in kv)

    def tally(self) -> QuestionTally:
        return QuestionTally(self.pages, CONTEXT, CONTEXT + QUESTION, KV_HEADS, CPU)

    def expected(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of all rows, and the mass on each key of the context, in plain attention."""
        slots = self.pages.slots(torch.arange(CONTEXT))
        own = slice(len(FRESH), None)
        keys, values = (
            torch.cat([self.kv[layer, kind][slots // BLOCK, slots % BLOCK], fresh[layer, own]])
            for kind, fresh in ((0, self.key), (1, self.value))
        )
        keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", self.query[layer], keys) * SCALE
        hidden = torch.arange(len(keys)) > self.rows.positions[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mass = weights[:, own, :CONTEXT].sum(1).view(KV_HEADS, -1, CONTEXT).sum(1)
        return torch.einsum("hqk,khd->qhd", weights, values), mass


def score(
    prompts: list[Prompt], most_rows: int, first_layer: int = 0
) -> tuple[list[QuestionTally], list[torch.Tensor]]:
    """All layers of every piece, as a blend scores; the tallies, and each prompt's outputs [layers, rows, ...]."""
    tallies = [prompt.tally() for prompt in prompts]
    outs = [torch.zeros_like(prompt.query) for prompt in prompts]
    done = [0] * len(prompts)
    for piece in slices([prompt.rows for prompt in prompts], most_rows):
        rows = RowBatch([part for _, part in piece], CPU)
        attention = ScoringAttention(rows, [tallies[index] for index, _ in piece], first_layer)
        where = [slice(done[index], done[index] + len(part.positions)) for index, part in piece]
        for layer in range(LAYERS):
            taken = [(prompts[index], at) for (index, _), at in zip(piece, where, strict=True)]
            query, key, value = (
                torch.cat([getattr(prompt, name)[layer, at] for prompt, at in taken])
                for name in ("query", "key", "value")
            )
            out = torch.empty_like(query)
            pages = prompts[piece[0][0]].layers[layer]
            attention.attend(LayerRows(layer, pages, query, key, value, SCALE, out))
            for (index, _), at, part in zip(piece, where, out.split([w.stop - w.start for w in where]), strict=True):
                outs[index][layer, at] = part
        for (index, part), at in zip(piece, where, strict=True):
            assert len(part.positions) == at.stop - at.start
            done[index] = at.stop
    return tallies, outs


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("most_rows", [100, 6, 5, 1])
def test_a_question_is_tallied_alike_in_one_piece_and_in_many(most_rows, packed):
    prompt = Prompt(3, packed)
    (tally,), (out,) = score([prompt], most_rows)
    expected = [prompt.expected(layer) for layer in range(LAYERS)]
    assert torch.allclose(tally.mass, torch.stack([mass for _, mass in expected]).sum(0), atol=1e-5)
    assert torch.allclose(out, torch.stack([attended for attended, _ in expected]), atol=1e-5)


def test_prompts_of_one_batch_are_tallied_each_for_itself():
    one, other = Prompt(5, packed=False), Prompt(6, packed=False)
    other.kv, other.layers = one.kv, one.layers
    for prompt, tally in zip((one, other), score([one, other], 100)[0], strict=True):
        want = sum(prompt.expected(layer)[1] for layer in range(LAYERS))
        assert torch.allclose(tally.mass, want, atol=1e-5)


@pytest.mark.parametrize("most_rows", [100, 5])
def test_layers_before_the_first_tallied_one_attend_and_add_nothing(most_rows):
    prompt = Prompt(3, packed=False)
    (tally,), (out,) = score([prompt], most_rows, first_layer=1)
    expected = [prompt.expected(layer) for layer in range(LAYERS)]
    assert torch.allclose(tally.mass, sum(mass for _, mass in expected[1:]), atol=1e-5)
    assert torch.allclose(out, torch.stack([attended for attended, _ in expected]), atol=1e-5)
