"""A searchable corpus: chunks, each scored by its best passage."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrieval.chunk import Chunk
from retrieval.errors import RetrievalError
from retrieval.passages import PassageIndex
from retrieval.protocols import Embedder
from retrieval.storage import damaged, read_manifest, read_parts, write_index

# Scores are compared to so many decimals: below that, the order in which floats were summed shows.
_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that was found, and the inner product of the question with its best passage, -1 to 1."""

    chunk: Chunk
    score: float


class CorpusIndex:
    """The chunks of one corpus, in memory; each corpus has an index of its own, saved in a folder of its own.

    A text that is in several chunks, of one document or of several, is kept and found once, as the chunk
    that was added first; it stays until the last document that holds it is deleted. Searching from several
    threads is safe, changing the index meanwhile is not.

    Example:
        >>> index = CorpusIndex(embedder)
        >>> index.add(chunker.chunk(document))
        >>> index.search("Who built the lighthouse?", k=5)[0].chunk.document_id
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._passages = PassageIndex(embedder.dimension)
        self._copies: dict[str, list[Chunk]] = {}
        self._passage_ids: dict[str, list[int]] = {}
        self._chunk_ids: dict[int, str] = {}
        self._documents: dict[str, dict[int, str]] = {}
        self._next_passage = 0

    def __len__(self) -> int:
        """Return the number of different chunk texts."""
        return len(self._copies)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """One chunk for each different text, in the order they were added."""
        return tuple(copies[0] for copies in self._copies.values())

    @property
    def document_ids(self) -> tuple[str, ...]:
        """The ids of the documents, in the order they were added."""
        return tuple(self._documents)

    @property
    def tokenizer_fingerprint(self) -> str:
        """The fingerprint of the tokenizer of all chunks; empty if there is none or no chunk."""
        return next((copies[0].tokenizer for copies in self._copies.values()), "")

    def add(self, chunks: Iterable[Chunk]) -> int:
        """Add ``chunks`` and return how many were not there yet; one that is there already is passed over.

        Raises:
            RetrievalError: a document is there with another text or cut otherwise (delete it first), or the
                chunks are of another tokenizer than those there; nothing is added then.
        """
        fresh = self._fresh(list(chunks))
        new_texts = {chunk.id: chunk.text for chunk in fresh if chunk.id not in self._copies}
        vectors, owner = self._embedder.embed_documents(list(new_texts.values()))
        names = list(new_texts)
        passage_ids = range(self._next_passage, self._next_passage + len(owner))
        self._passages.add(vectors, passage_ids)
        for chunk in fresh:
            self._register(chunk)
        for passage, place in zip(passage_ids, owner.tolist(), strict=True):
            self._register_passage(passage, names[place])
        return len(fresh)

    def delete(self, document_ids: Iterable[str]) -> int:
        """Delete documents without building the index anew and return how many chunks went with them.

        Raises:
            RetrievalError: a document is not there; nothing is deleted then.
        """
        names = set([document_ids] if isinstance(document_ids, str) else document_ids)
        for name in sorted(names):
            if name not in self._documents:
                raise RetrievalError(f"document {name!r} is not in the index, so it cannot be deleted; check its id.")
        held = {chunk_id for name in names for chunk_id in self._documents.pop(name).values()}
        return sum(self._forget(chunk_id, names) for chunk_id in held)

    def search(self, query: str, k: int) -> list[Hit]:
        """Return the best ``k`` chunks for ``query``, all if there are fewer, best first, ties by chunk id.

        Of a query longer than the embedder reads only the beginning counts. Scores are rounded to 6 decimals.

        Raises:
            RetrievalError: the query or the index is empty, or ``k`` is below 1.
        """
        if not query.strip():
            raise RetrievalError("the question is empty; ask something.")
        if k < 1:
            raise RetrievalError(f"{k} chunks cannot be found; give a k of 1 or more.")
        if not self._copies:
            raise RetrievalError("the index is empty; add documents before searching.")
        ranked = self._ranked(query, min(k, len(self)))
        return [Hit(self._copies[chunk_id][0], score) for chunk_id, score in ranked]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the index to ``folder``, replacing atomically what was saved there.

        Metadata values that JSON does not know are saved as strings.

        Raises:
            RetrievalError: the folder cannot be written; what was saved there is unharmed.
        """
        description = {"embedder": self._embedder_description(), "counts": self._counts()}
        write_index(Path(folder), description, self._passages.to_bytes(), self._rows())

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], embedder: Embedder, tokenizer_fingerprint: str | None = None
    ) -> "CorpusIndex":
        """Return the index saved in ``folder``.

        Args:
            folder: where it was saved.
            embedder: the embedder it was built with.
            tokenizer_fingerprint: that of the tokenizer about to be used; None if the chunks' token ids
                will not be.

        Raises:
            RetrievalError: there is no index, it is damaged, of another version, or was built with another
                embedder or another tokenizer.
        """
        path = Path(folder)
        manifest = read_manifest(path)
        index = cls(embedder)
        index._check_embedder(path, manifest)
        passages, rows = read_parts(path, manifest)
        try:
            index._passages = PassageIndex.from_bytes(passages)
            index._restore(rows)
        except (KeyError, TypeError, RuntimeError) as error:
            raise damaged(path, "chunks and passages") from error
        if index._counts() != manifest.get("counts") or index._passages.ids != set(index._chunk_ids):
            raise damaged(path, "the counts differ")
        index._check_tokenizer(path, tokenizer_fingerprint)
        return index

    def _fresh(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks that are not there yet, each once; refuse what does not fit to what is there."""
        known = self.tokenizer_fingerprint if self._copies else chunks[0].tokenizer if chunks else ""
        placed: dict[tuple[str, int], Chunk] = {}
        for chunk in chunks:
            if chunk.tokenizer != known:
                raise RetrievalError(
                    f"the chunks of document {chunk.document_id!r} are of another tokenizer than those "
                    "in the index; use one tokenizer for a corpus."
                )
            there = self._documents.get(chunk.document_id, {}).get(chunk.index)
            earlier = placed.setdefault((chunk.document_id, chunk.index), chunk)
            if (there or earlier.id) != chunk.id:
                raise RetrievalError(
                    f"document {chunk.document_id!r} is in the index with another text or cut otherwise; "
                    "delete it there or give this one its own id."
                )
            if there:
                del placed[chunk.document_id, chunk.index]
        return list(placed.values())

    def _register(self, chunk: Chunk) -> None:
        self._copies.setdefault(chunk.id, []).append(chunk)
        self._documents.setdefault(chunk.document_id, {})[chunk.index] = chunk.id

    def _register_passage(self, passage: int, chunk_id: str) -> None:
        self._passage_ids.setdefault(chunk_id, []).append(passage)
        self._chunk_ids[passage] = chunk_id
        self._next_passage = max(self._next_passage, passage + 1)

    def _forget(self, chunk_id: str, document_ids: set[str]) -> int:
        """Take the documents' copies from a chunk, and the chunk out of the index with the last one."""
        copies = self._copies[chunk_id]
        left = [chunk for chunk in copies if chunk.document_id not in document_ids]
        if left:
            self._copies[chunk_id] = left
        else:
            del self._copies[chunk_id]
            passages = self._passage_ids.pop(chunk_id)
            self._passages.remove(passages)
            for passage in passages:
                del self._chunk_ids[passage]
        return len(copies) - len(left)

    def _ranked(self, query: str, k: int) -> list[tuple[str, float]]:
        """Return id and score of the best ``k`` chunks; ``k`` is at most the number of chunks."""
        vector = self._embedder.embed_passages([query])[0]
        depth = k
        while True:
            depth = min(2 * depth, len(self._passages))
            nearest = [(self._chunk_ids[i], round(s, _DECIMALS)) for i, s in self._passages.nearest(vector, depth)]
            # Best first, so a chunk's best passage is its first: reversed, that one is written last.
            best = dict(reversed(nearest))
            ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:k]
            # Deeper until no passage further down can tie with the last one chosen.
            if depth == len(self._passages) or (len(ranked) == k and nearest[-1][1] < ranked[-1][1]):
                return ranked

    def _embedder_description(self) -> dict[str, Any]:
        embedder = self._embedder
        return {"name": embedder.name, "fingerprint": embedder.fingerprint, "dimension": embedder.dimension}

    def _check_embedder(self, folder: Path, manifest: dict[str, Any]) -> None:
        mine, theirs = self._embedder_description(), manifest.get("embedder")
        if not isinstance(theirs, dict):
            raise damaged(folder, "the manifest names no embedder")
        if any(mine[field] != theirs.get(field) for field in ("fingerprint", "dimension")):
            raise RetrievalError(
                f"the index in {folder} was built with the embedder {theirs.get('name')} "
                f"({theirs.get('fingerprint')}), not with {mine['name']} ({mine['fingerprint']}); "
                "use that one or build the index again."
            )

    def _check_tokenizer(self, folder: Path, fingerprint: str | None) -> None:
        mine = self.tokenizer_fingerprint
        if fingerprint is not None and self._copies and fingerprint != mine:
            raise RetrievalError(
                f"the chunks of the index in {folder} are of the tokenizer {mine or 'none'}, "
                f"not {fingerprint}; use the model they were cut for or build the index again."
            )

    def _counts(self) -> dict[str, int]:
        return {
            "documents": len(self._documents),
            "chunks": sum(map(len, self._copies.values())),
            "texts": len(self._copies),
            "passages": len(self._passages),
        }

    def _rows(self) -> Iterator[dict[str, Any]]:
        for chunk_id, copies in self._copies.items():
            for chunk in copies:
                yield {**asdict(chunk), "passages": self._passage_ids[chunk_id]}

    def _restore(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            passages = row.pop("passages")
            chunk = Chunk(**{**row, "token_ids": tuple(row["token_ids"])})
            if chunk.id not in self._copies:
                for passage in passages:
                    self._register_passage(passage, chunk.id)
            self._register(chunk)
