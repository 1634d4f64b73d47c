"""Documents cut into chunks of at most so many tokens."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from retrieval.chunk import Chunk
from retrieval.cuts import TokenCuts
from retrieval.documents import Document
from retrieval.errors import RetrievalError
from retrieval.sentences import sentence_ends
from retrieval.text import content_hash

__all__ = ["Chunk", "TokenChunker"]

# By so many tokens a piece tokenised alone may come out shorter than it is within the document.
_EDGE = 4


@dataclass(frozen=True, slots=True)
class _Layout:
    """A document's text and where it may be cut."""

    text: str
    cuts: TokenCuts
    sentences: list[int]

    def last_sentence(self, limit: int) -> int:
        """Return the last end of a sentence up to ``limit``, 0 if there is none."""
        place = bisect_right(self.sentences, limit)
        return self.sentences[place - 1] if place else 0

    def next_sentence(self, position: int) -> int:
        """Return the first end of a sentence behind ``position``, the text's end if there is none."""
        place = bisect_right(self.sentences, position)
        return self.sentences[place] if place < len(self.sentences) else len(self.text)

    def sentences_down(self, high: int, low: int) -> Iterator[int]:
        """Yield the ends of sentences in (low, high], descending."""
        return reversed(self.sentences[bisect_right(self.sentences, low) : bisect_right(self.sentences, high)])


class TokenChunker:
    """Cuts documents into chunks whose token ids are exactly those of their own text.

    A chunk's text is the document's title on a line of its own, if there is a title, and a run of the
    document's text. Chunks are tokenised alone: ``token_ids`` equals ``tokenizer(text,
    add_special_tokens=False, split_special_tokens=True)`` and never exceeds ``size``, title line included: a
    text that spells out a special token stays text. Without overlap the bodies concatenate to the document's
    text: nothing is lost.

    * A title that would take more than half of ``size`` is cut to that (dropped if not one token fits).
    * With ``respect_sentences`` a chunk ends at the end of a sentence; only a sentence that does not fit
      into a chunk of its own is cut, at a word's end if possible, else between tokens, never inside a
      character.
    * ``overlap`` is the most tokens, counted in the document, that a chunk repeats of the one before. With
      ``respect_sentences`` it repeats whole sentences, so none when the last one is longer than ``overlap``
      or when the next one would not fit behind it. Where a sentence had to be cut, overlap is counted in
      tokens.

    Example:
        >>> TokenChunker(tokenizer, size=256).chunk(Document("lighthouse", text, title="The lighthouse"))
    """

    def __init__(self, tokenizer: Any, size: int = 512, overlap: int = 0, respect_sentences: bool = True) -> None:
        """Take a Hugging Face tokenizer that gives character offsets, and sizes in tokens.

        Raises:
            RetrievalError: ``size`` is below 1, ``overlap`` is not within 0 to ``size - 1``, or the
                tokenizer gives no offsets.
        """
        if not _is_int(size) or size < 1:
            raise RetrievalError(f"a chunk size of {size!r} tokens is not possible; give an integer of 1 or more.")
        if not _is_int(overlap) or not 0 <= overlap < size:
            raise RetrievalError(
                f"an overlap of {overlap!r} tokens is not possible with chunks of {size}; "
                f"give an integer from 0 to {size - 1}."
            )
        if not getattr(tokenizer, "is_fast", False):
            raise RetrievalError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets; load the fast one."
            )
        self._tokenizer = tokenizer
        self.size = size
        self.overlap = overlap
        self.respect_sentences = respect_sentences

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """32 hexadecimal digits that identify the tokenizer by content, whatever folder it came from."""
        state = self._tokenizer.backend_tokenizer.to_str()
        # Truncation and padding come before; they are left behind by whoever used the tokenizer last.
        return content_hash(state[state.index('"added_tokens"') :])

    def chunk(self, document: Document) -> list[Chunk]:
        """Return the chunks of ``document`` in order, at least one.

        Raises:
            RetrievalError: a single character takes more than ``size`` tokens, or the text gives no tokens
                at all.
        """
        head = self._head(document.title)
        budget = self.size - len(self._encode(head))
        layout = self._layout(document)
        chunks: list[Chunk] = []
        start = done = 0
        while done < len(document.text):
            piece = self._piece(layout, head, budget, start, done)
            if piece is None and start == done:
                raise self._too_small(document, done)
            if piece is None:
                # What is repeated leaves no room for the next sentence.
                start = done
                continue
            done, token_ids = piece
            chunks.append(self._make(document, head, start, done, token_ids, len(chunks)))
            start = self._overlap_start(layout, start, done)
        return chunks

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _cuts(self, text: str) -> TokenCuts:
        # verbose=False: a document longer than the model's context is no cause for a warning here.
        encoded = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        return TokenCuts(text, encoded["offset_mapping"])

    def _layout(self, document: Document) -> _Layout:
        text = document.text
        cuts = self._cuts(text)
        if cuts.tokens(0, len(text)) == 0:
            raise RetrievalError(
                f"the text of document {document.id!r} gives no tokens with this tokenizer; leave it out."
            )
        return _Layout(text, cuts, sentence_ends(text) if self.respect_sentences else [])

    def _head(self, title: str) -> str:
        """Return the title line, cut to half of ``size``."""
        title = " ".join(title.split())
        if not title:
            return ""
        cuts = self._cuts(title)
        room = self.size // 2
        for end in (len(title), *cuts.descending(0, cuts.furthest(0, room))):
            head = title[:end].rstrip() + "\n"
            if len(self._encode(head)) <= room:
                return head
        return ""

    def _piece(self, layout: _Layout, head: str, budget: int, start: int, done: int) -> tuple[int, list[int]] | None:
        """Return end and token ids of the chunk at ``start``, or None if none gets beyond ``done``."""
        for end in self._ends(layout, budget, start, done):
            token_ids = self._encode(head + layout.text[start:end])
            if 0 < len(token_ids) <= self.size:
                return end, token_ids
        return None

    def _ends(self, layout: _Layout, budget: int, start: int, done: int) -> Iterator[int]:
        """Yield where the chunk at ``start`` may end, best first, all beyond ``done``."""
        limit = layout.cuts.furthest(start, budget)
        if self.respect_sentences:
            sentence = max(layout.last_sentence(limit), done)
            following = layout.next_sentence(sentence)
            if layout.cuts.tokens(sentence, following) <= budget + _EDGE:
                yield from layout.sentences_down(limit, done)
                if start < done:
                    return
                if sentence == done:
                    yield following
        yield from (end for end in layout.cuts.descending(start, limit) if end > done)

    def _overlap_start(self, layout: _Layout, start: int, end: int) -> int:
        """Return where the chunk behind [start, end) starts: at ``end``, or earlier where it overlaps."""
        if not self.overlap or end == len(layout.text):
            return end
        whole_sentences = self.respect_sentences and layout.last_sentence(end) == end
        places = layout.sentences if whole_sentences else layout.cuts.ends
        inside = places[bisect_right(places, start) : bisect_right(places, end)]
        return next((place for place in inside if layout.cuts.tokens(place, end) <= self.overlap), end)

    def _too_small(self, document: Document, position: int) -> RetrievalError:
        character = next(each for each in document.text[position:] if self._encode(each))
        return RetrievalError(
            f"chunks of {self.size} tokens are too small for document {document.id!r}: the character "
            f"{character!r} alone takes {len(self._encode(character))}; give a larger size."
        )

    def _make(self, document: Document, head: str, start: int, end: int, token_ids: list[int], index: int) -> Chunk:
        text = head + document.text[start:end]
        return Chunk(
            id=content_hash(text),
            document_id=document.id,
            title=document.title,
            text=text,
            token_ids=tuple(token_ids),
            start_char=start,
            end_char=end,
            index=index,
            metadata=document.metadata,
            tokenizer=self.tokenizer_fingerprint,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
