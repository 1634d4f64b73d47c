"""Sentence embeddings by a sentence-transformers model."""

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from retrieval.errors import RetrievalError
from retrieval.text import clean_text
from retrieval.windows import split_windows

_READ_BY_THE_MODEL = ("*.safetensors", "*.json", "*.txt", "*.model", "*/*.json", "*/*.safetensors")


class SentenceEmbedder:
    """A sentence-transformers model as ``retrieval.protocols.Embedder``.

    Example:
        >>> embedder = SentenceEmbedder("path/to/all-minilm-l6-v2")
        >>> embedder.embed_passages(["a lighthouse", "a beacon"]).shape
        (2, 384)
    """

    def __init__(self, folder_or_name: str | os.PathLike[str], device: str | None = None, batch_size: int = 32) -> None:
        """Load the model from a folder or a hub id, onto ``device`` (None: a GPU if there is one).

        Raises:
            RetrievalError: the model cannot be loaded, or ``batch_size`` is below 1.
        """
        if batch_size < 1:
            raise RetrievalError(f"an embedding batch size of {batch_size!r} is not possible; give 1 or more.")
        source = os.fspath(folder_or_name)
        self._batch_size = batch_size
        try:
            self._model = SentenceTransformer(source, device=device)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RetrievalError(
                f"the embedder {source!r} cannot be loaded ({reason}); give a sentence-transformers folder or hub id."
            ) from error
        is_folder = Path(source).is_dir()
        self._folder = Path(source if is_folder else snapshot_download(source, local_files_only=True)).resolve()
        self.name = self._folder.name if is_folder else source
        self.dimension = int(self._model.get_embedding_dimension())

    @property
    def device(self) -> str:
        """The device the model runs on, as torch names it."""
        return str(self._model.device)

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over names, sizes and bytes of weights, vocabulary and settings."""
        digest = hashlib.sha256()
        for file in sorted({file for pattern in _READ_BY_THE_MODEL for file in self._folder.glob(pattern)}):
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{file.relative_to(self._folder).as_posix()} {file.stat().st_size} {content}\n".encode())
        return digest.hexdigest()[:32]

    def embed_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one vector of length 1 a text, float32 [texts, dimension].

        Of a text longer than the model reads (256 word pieces for all-MiniLM-L6-v2) only the beginning
        counts; see ``embed_documents``.
        """
        if not texts:
            return np.empty((0, self.dimension), dtype=np.float32)
        vectors = self._model.encode(
            [clean_text(text) for text in texts],
            batch_size=self._batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)

    def embed_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return vectors of windows that together cover all of each text.

        Returns:
            vectors: float32 [passages, dimension], each of length 1; a text that the model reads whole has
                one.
            owner: int64 [passages], the place in ``texts`` of each passage's text, ascending.
        """
        windows = [self._windows(text) for text in texts]
        owner = [place for place, passages in enumerate(windows) for _ in passages]
        vectors = self.embed_passages([passage for passages in windows for passage in passages])
        return vectors, np.asarray(owner, dtype=np.int64)

    def _windows(self, text: str) -> list[str]:
        tokenizer = self._model.tokenizer
        capacity = self._model.max_seq_length - tokenizer.num_special_tokens_to_add(pair=False)
        return split_windows(clean_text(text), tokenizer, capacity)
