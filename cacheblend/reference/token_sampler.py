"""Draws tokens from logits, each sequence with its own generator."""

from __future__ import annotations

import torch

from cacheblend.sampling_params import SamplingParams


class TokenSampler:
    """Greedy or sampled decoding; a sequence's draws do not depend on what else is in the batch."""

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}

    def draw(self, sequence_id: str, logits: torch.Tensor, params: SamplingParams) -> int:
        """One token.

        Args:
            sequence_id: whose generator is used.
            logits: [vocabulary] float32.
            params: how to draw.

        Returns:
            A token id.
        """
        if params.temperature == 0.0:
            return int(logits.argmax())
        scaled = _keep_top_k(_at_temperature(logits, params.temperature), params.top_k)
        probabilities = _keep_nucleus(scaled.softmax(-1), params.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator(sequence_id, params)))

    def forget(self, sequence_id: str) -> None:
        """Drop the sequence's generator."""
        self._generators.pop(sequence_id, None)

    def _generator(self, sequence_id: str, params: SamplingParams) -> torch.Generator:
        if sequence_id not in self._generators:
            generator = torch.Generator()
            if params.seed is None:
                generator.seed()
            else:
                generator.manual_seed(params.seed)
            self._generators[sequence_id] = generator
        return self._generators[sequence_id]


def _at_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[vocabulary] float64, 0 at most: however low the temperature, the likeliest token stays finite."""
    wide = logits.double().cpu()
    return (wide - wide.max()) / temperature


def _keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    if k == 0 or k >= len(logits):
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf)


def _keep_nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p >= 1.0:
        return probabilities
    ordered, index = probabilities.sort(descending=True)
    # A token stays while the mass before it is below top_p, so the likeliest always stays.
    dropped = index[ordered.cumsum(-1) - ordered >= top_p]
    return probabilities.index_fill(0, dropped, 0.0)
