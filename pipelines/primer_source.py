"""Where a pipeline's primer comes from: its own chunks, a file, or nowhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pipelines.errors import PipelineError
from pipelines.primer import PRIMER_TOKENS, choose_primer, leading_chunks
from retrieval.chunk import Chunk
from retrieval.chunking import TokenChunker
from retrieval.readers import read_documents

logger = logging.getLogger(__name__)

SPARE_TOKENS = 16
"""Left free behind a chunk: an engine may need a few new tokens of a request that computes one."""

_INSTEAD = "or use `auto` or none."


class PrimerSource:
    """The setting `primer`, its file read and cut.

    Args:
        setting: see `PipelineConfig`.
        chunker: cuts the corpus's documents.

    Raises:
        PipelineError: if the setting's path names no file, or a file with which no whole chunk fits a primer.
        RetrievalError: if the file is empty, binary, not UTF-8 or of another kind.
    """

    def __init__(self, setting: Literal["auto"] | Path | None, chunker: TokenChunker) -> None:
        self._setting = setting
        self._chunk_tokens = chunker.size
        self._pinned = _read(setting, chunker) if isinstance(setting, Path) else ()

    def choose(self, corpus: Sequence[Chunk], head_tokens: int, max_model_len: int) -> tuple[Chunk, ...]:
        """The chunks of the primer, in their order.

        Args:
            corpus: the pipeline's chunks.
            head_tokens: that come before the primer.
            max_model_len: rows that the model takes. `auto` chooses fewer chunks where they would not fit.

        Raises:
            PipelineError: if the file's primer leaves no room for a chunk.
        """
        room = max_model_len - SPARE_TOKENS - head_tokens - self._chunk_tokens
        if self._setting == "auto":
            by_ids = {chunk.token_ids: chunk for chunk in corpus}
            return tuple(by_ids[ids] for ids in choose_primer(tuple(by_ids), min(PRIMER_TOKENS, room)))
        tokens = sum(len(chunk.token_ids) for chunk in self._pinned)
        if self._pinned and tokens > room:
            raise PipelineError(
                f"The primer {self._setting} of {tokens} tokens leaves no room for chunks of {self._chunk_tokens} "
                f"behind a prefix of {head_tokens} in the model's context of {max_model_len}; shorten it, {_INSTEAD}"
            )
        return self._pinned


def save_primer(path: Path, chunks: Iterable[Chunk]) -> None:
    """Write a primer so that the setting `primer` with this path gives exactly these chunks again.

    Raises:
        PipelineError: if the path does not end in `.jsonl`, or there is no primer.
        OSError: if it cannot be written.
    """
    require_saveable(path)
    lines = [json.dumps({"text": chunk.text}, ensure_ascii=False) + "\n" for chunk in chunks]
    if not lines:
        raise PipelineError(
            f"There is no primer to save as {path}; use `auto`, and more documents or smaller chunks if it finds none."
        )
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def require_saveable(path: Path) -> None:
    """Refuse a name that a primer cannot be read from again.

    Raises:
        PipelineError: if it does not end in `.jsonl`.
    """
    if path.suffix.lower() != ".jsonl":
        raise PipelineError(f"The primer cannot be saved as {path}; give a name that ends in .jsonl.")


def _read(path: Path, chunker: TokenChunker) -> tuple[Chunk, ...]:
    if not path.is_file():
        raise PipelineError(f"The primer {path} is not a file; name a .txt, .md or .jsonl file, {_INSTEAD}")
    chunks = {chunk.token_ids: chunk for document in read_documents(path) for chunk in chunker.chunk(document)}
    kept = tuple(chunks[ids] for ids in leading_chunks(tuple(chunks), PRIMER_TOKENS))
    if not kept:
        raise PipelineError(
            f"The primer {path} begins with a chunk of more than {PRIMER_TOKENS} tokens; begin it with a shorter "
            "document, or use smaller chunks."
        )
    if len(kept) < len(chunks):
        logger.info("the primer is the first %d of the %d chunks of %s", len(kept), len(chunks), path)
    return kept
