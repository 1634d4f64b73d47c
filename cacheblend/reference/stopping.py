"""When a sequence ends."""

from __future__ import annotations

from typing import Any

from cacheblend.protocols import FinishReason
from cacheblend.reference.sequence import RunningSequence


class StopConditions:
    """Checks a sequence after each new token.

    Args:
        eos_token_ids: the model's end-of-sequence ids.
        tokenizer: decodes generated ids for stop strings; None where the model has none.
    """

    def __init__(self, eos_token_ids: frozenset[int], tokenizer: Any | None) -> None:
        self._eos = eos_token_ids
        self._tokenizer = tokenizer

    @property
    def knows_text(self) -> bool:
        """Whether stop strings can be checked."""
        return self._tokenizer is not None

    def reason(self, sequence: RunningSequence) -> FinishReason | None:
        """Why the sequence ends now, or None."""
        last, params = sequence.generated[-1], sequence.sampling
        if last in params.stop_token_ids or (last in self._eos and not params.ignore_eos):
            return FinishReason.STOP
        if params.stop and self._tokenizer is not None:
            text = self._tokenizer.decode(sequence.generated, skip_special_tokens=True)
            if any(stop in text for stop in params.stop):
                return FinishReason.STOP
        if len(sequence.generated) >= params.max_tokens:
            return FinishReason.LENGTH
        return None
