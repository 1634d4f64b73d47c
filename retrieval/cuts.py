"""Places where a tokenised text may be cut."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence


class TokenCuts:
    """Positions in a text between two of its tokens, none of them inside a character.

    Counts are those of the whole text's tokenisation. A piece tokenised alone may differ by a token or two,
    so whoever cuts must count again.
    """

    def __init__(self, text: str, offsets: Sequence[tuple[int, int]]) -> None:
        """Take ``offsets``, the [start, end) characters of each token of ``text``."""
        self._length = len(text)
        self.ends, self._counts = _ends_and_counts(offsets, len(text))
        self._word_ends = [
            end for end in self.ends if end == len(text) or text[end].isspace() or text[end - 1].isspace()
        ]

    def tokens(self, start: int, end: int) -> int:
        """Return the number of tokens between two positions; a token that is cut counts on its right side."""
        return self._tokens_before(end) - self._tokens_before(start)

    def furthest(self, start: int, budget: int) -> int:
        """Return the furthest cut at most ``budget`` tokens behind ``start``; ``start`` if there is none."""
        place = bisect_right(self._counts, self._tokens_before(start) + budget) - 1
        return max(start, self.ends[place]) if place >= 0 else start

    def descending(self, start: int, limit: int) -> Iterator[int]:
        """Yield where a piece behind ``start`` may end, best first.

        Ends of words in the second half up to ``limit``, then ends of tokens up to ``limit``, each from the
        furthest; then every character of the first token, for when not even that token fits.
        """
        yield from _reversed_between(self._word_ends, start + (limit - start) // 2, limit)
        yield from _reversed_between(self.ends, start, limit)
        first = bisect_right(self.ends, start)
        if first < len(self.ends):
            yield from range(self.ends[first], start, -1)

    def _tokens_before(self, position: int) -> int:
        place = bisect_right(self.ends, position) - 1
        return self._counts[place] if place >= 0 else 0


def _ends_and_counts(offsets: Sequence[tuple[int, int]], length: int) -> tuple[list[int], list[int]]:
    """Return the cuts, ascending, the last at ``length``, and the number of tokens before each."""
    ends: list[int] = []
    counts: list[int] = []
    reach = 0
    for number, (start, end) in enumerate(offsets):
        # The bytes of one character may be several tokens that share its offsets: no cut between those.
        if start >= reach > (ends[-1] if ends else 0):
            ends.append(reach)
            counts.append(number)
        reach = max(reach, end)
    if ends and ends[-1] >= length:
        ends.pop()
        counts.pop()
    return [*ends, length], [*counts, len(offsets)]


def _reversed_between(places: list[int], low: int, high: int) -> Iterator[int]:
    """Yield the ``places`` in (low, high], descending."""
    return reversed(places[bisect_left(places, low + 1) : bisect_right(places, high)])
