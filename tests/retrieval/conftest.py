"""The real models of these tests, resolved once a session."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipelines.models import resolve_embedder, resolve_model
from retrieval.embedding import SentenceEmbedder


@pytest.fixture(scope="session")
def embedder_folder() -> Path:
    return resolve_embedder("bundled:all-minilm-l6-v2")


@pytest.fixture(scope="session")
def embedder(embedder_folder: Path) -> SentenceEmbedder:
    return SentenceEmbedder(embedder_folder, device="cpu")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The language model's tokenizer: byte-level, several tokens for one emoji."""
    return AutoTokenizer.from_pretrained(resolve_model("bundled:smollm2-135m"))
