"""How tokens are drawn from logits and when a sequence ends. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cacheblend.errors import BlendError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Decoding parameters of one sequence, named as vLLM names them.

    Attributes:
        max_tokens: new tokens at most, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: nucleus mass in (0, 1]; 1 keeps everything.
        top_k: keep the k likeliest tokens; 0 keeps all.
        seed: of the sequence's own random generator, 0 to 2**63 - 1; None draws a new one.
        stop: strings that end the sequence; the text is cut before the first one found.
        stop_token_ids: ids that end the sequence; they are returned as its last token.
        ignore_eos: go on after the model's end-of-sequence ids.

    Raises:
        BlendError: if a value is outside its range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BlendError(f"max_tokens is {self.max_tokens}; ask for at least 1.")
        if not 0.0 <= self.temperature < inf:
            raise BlendError(f"temperature is {self.temperature}; use 0 for greedy or a positive number.")
        if not 0.0 < self.top_p <= 1.0:
            raise BlendError(f"top_p is {self.top_p}; use a number above 0 and at most 1.")
        if self.top_k < 0:
            raise BlendError(f"top_k is {self.top_k}; use 0 for all tokens or a positive number.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise BlendError(f"seed is {self.seed}; use a whole number from 0 to 2**63 - 1.")
        if isinstance(self.stop, str):
            raise BlendError(f"stop is the string {self.stop!r}; give a tuple of strings.")
        if any(not text for text in self.stop):
            raise BlendError("A stop string is empty; give it at least one character.")
