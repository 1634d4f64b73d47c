"""A chunk of a document."""

from dataclasses import dataclass, field
from typing import Any

from retrieval.documents import Document
from retrieval.text import content_hash


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a document's text, tokenised alone.

    Attributes:
        id: hash of ``text``: equal texts have equal ids, whatever document they are from.
        document_id: the document's id.
        title: the document's whole title, of which ``text`` may repeat less.
        text: the title line, if any, and the body.
        token_ids: ids of ``text`` with special tokens read as text, int; empty where no tokenizer was involved.
        start_char: where the body starts in the document's text.
        end_char: where the body ends in the document's text.
        index: place among the document's chunks, from 0.
        metadata: the document's metadata.
        tokenizer: fingerprint of the tokenizer of ``token_ids``; empty where none was involved.
    """

    id: str
    document_id: str
    title: str
    text: str
    token_ids: tuple[int, ...]
    start_char: int
    end_char: int
    index: int
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    tokenizer: str = ""

    @property
    def body(self) -> str:
        """The text without the title line: ``document.text[start_char:end_char]``."""
        return self.text[len(self.text) - (self.end_char - self.start_char) :]

    @classmethod
    def whole(cls, document: Document) -> "Chunk":
        """Return ``document`` as one chunk of any length, without token ids."""
        title = " ".join(document.title.split())
        text = f"{title}\n{document.text}" if title else document.text
        return cls(
            content_hash(text),
            document.id,
            document.title,
            text,
            (),
            0,
            len(document.text),
            0,
            document.metadata,
        )
