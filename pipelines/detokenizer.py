"""Token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns a growing list of ids into text that never takes anything back.

    Text is held back while it ends inside a character, or with what may become a stop string.

    Args:
        tokenizer: the model's tokenizer.
        stop: strings that end the text; nothing from the first one found on is given out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._given = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not given before."""
        self._ids.extend(token_ids)
        text = self.text()
        end = len(text) - self._uncertain(text)
        piece = text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def finish(self) -> str:
        """What was held back."""
        text = self.text()
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def text(self) -> str:
        """All text so far, cut before the first stop string."""
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        return text[: min(ends)] if ends else text

    def _uncertain(self, text: str) -> int:
        sure = text.rstrip(_INCOMPLETE)
        open_end = len(text) - len(sure)
        longest = max((len(stop) for stop in self._stop), default=1)
        for length in range(min(longest - 1, len(sure)), 0, -1):
            if any(stop.startswith(sure[-length:]) for stop in self._stop):
                return open_end + length
        return open_end
