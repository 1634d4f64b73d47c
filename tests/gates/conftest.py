"""The bench of the gates: a runner, a store, and an oracle that is transformers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.reference.sequence import RunningSequence
from cacheblend.sampling_params import SamplingParams
from cacheblend.selectors import Selector
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore

GIB = 1 << 30


@dataclass
class Bench:
    """One model under test.

    `oracle` is the same weights under transformers' own attention and no cache: nothing of ours runs in it.
    """

    runner: ReferenceRunner
    oracle: Any
    store: ChunkStore
    vocabulary: int

    @classmethod
    def load(cls, folder: Path, dtype: str = "float32", root: Path | None = None) -> Bench:
        from transformers import AutoModelForCausalLM

        store = ChunkStore(root, 2 * GIB)
        runner = ReferenceRunner.from_folder(folder, store, dtype)
        oracle = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        return cls(runner, oracle, store, oracle.config.vocab_size)

    def ids(self, count: int, seed: int) -> tuple[int, ...]:
        """Random token ids above the special ones."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(3, self.vocabulary, (count,), generator=generator).tolist())

    @torch.inference_mode()
    def full(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[vocabulary] logits of the oracle after the prompt."""
        return self.oracle(torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1].float()

    def collect(self, chunk: Sequence[int], prefix: Sequence[int] = ()) -> ChunkIdentity:
        self.runner.collect([chunk], prefix)
        return ChunkIdentity(self.runner.fingerprint, tuple(prefix), tuple(chunk))

    def plan(
        self,
        chunks: Sequence[ChunkIdentity | Sequence[int]],
        question: Sequence[int],
        selector: Selector,
        system: Sequence[int] = (),
    ) -> BlendPlan:
        """A prompt of `system`, chunks (reused if an identity, fresh if bare ids) and `question`."""
        parts = [Segment(SegmentRole.SYSTEM, tuple(system))] if system else []
        for chunk in chunks:
            if isinstance(chunk, ChunkIdentity):
                parts.append(Segment(SegmentRole.CHUNK, chunk.token_ids, chunk))
            else:
                parts.append(Segment(SegmentRole.CHUNK, tuple(chunk)))
        return BlendPlan((*parts, Segment(SegmentRole.QUESTION, tuple(question))), selector)

    def logits(self, plan: BlendPlan) -> torch.Tensor:
        """[vocabulary] log-probabilities after the prompt, as the runner blends it."""
        return self.runner.score(plan)[0][-1]

    def logits_together(self, plans: Sequence[BlendPlan]) -> list[torch.Tensor]:
        """[vocabulary] logits after each prompt, all prefilled in one batch."""
        sampling = SamplingParams(max_tokens=1)
        batch = [RunningSequence(str(index), plan, sampling) for index, plan in enumerate(plans)]
        return [logits[-1] for logits in self.runner._blend.run(batch)]

    def tokens(self, plans: Sequence[BlendPlan], count: int = 8) -> list[list[int]]:
        """Greedy tokens of each plan, all served together."""
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        ids = [self.runner.prefill(plan, sampling) for plan in plans]
        answers: dict[str, list[int]] = {i: [] for i in ids}
        running = set(ids)
        while running:
            output = self.runner.step()
            for sequence, tokens in output.tokens.items():
                answers[sequence].extend(tokens)
            running -= set(output.finished)
        for i in ids:
            self.runner.release(i)
        return [answers[i] for i in ids]

    def oracle_tokens(self, token_ids: Sequence[int], count: int = 8) -> list[int]:
        """Greedy tokens of the oracle, prefilled afresh for each."""
        ids = list(token_ids)
        for _ in range(count):
            ids.append(int(self.full(ids).argmax()))
        return ids[len(token_ids) :]


@pytest.fixture(scope="session")
def _benches(tiny_folder) -> dict[str, Bench]:
    return {}


@pytest.fixture(scope="session")
def bench(variant: str, tiny_folder, _benches: dict[str, Bench]) -> Bench:
    """A bench for each supported family and RoPE variant."""
    if variant not in _benches:
        _benches[variant] = Bench.load(tiny_folder(variant))
    return _benches[variant]


@pytest.fixture(scope="session")
def llama(tiny_folder, _benches: dict[str, Bench]) -> Bench:
    """The bench of the plain Llama, for gates that need one model only."""
    if "llama-default" not in _benches:
        _benches["llama-default"] = Bench.load(tiny_folder("llama-default"))
    return _benches["llama-default"]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference of two distributions' log-probabilities; logits are normalised first."""
    return float((got.log_softmax(-1) - want.log_softmax(-1)).abs().max())


@pytest.fixture(scope="session")
def max_error():
    """The function that compares log-probabilities."""
    return error


@pytest.fixture(scope="session")
def load_bench():
    """The function that loads a bench from a model folder."""
    return Bench.load
