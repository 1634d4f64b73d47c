"""Embeddings: unit vectors, and windows that cover all of a text."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.embedding import SentenceEmbedder
from retrieval.errors import RetrievalError
from retrieval.windows import split_windows

LONG = " ".join(f"Item {n} lies on shelf {n * 3}." for n in range(120))


def test_vectors_have_length_one_and_the_models_dimension(embedder: SentenceEmbedder) -> None:
    vectors = embedder.embed_passages(["a lighthouse", "", "\0", "\ud800", "👨‍👩‍👧 שלום"])
    assert (vectors.shape, vectors.dtype) == ((5, embedder.dimension), np.float32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert embedder.embed_passages([]).shape == (0, embedder.dimension)


def test_near_meanings_are_nearer_than_far_ones(embedder: SentenceEmbedder) -> None:
    dog, puppy, tax = embedder.embed_passages(["a dog barks", "the puppy is barking", "tax law of 1921"])
    assert dog @ puppy > dog @ tax + 0.3


def test_a_text_the_model_reads_whole_has_the_vector_of_its_passage(embedder: SentenceEmbedder) -> None:
    vectors, owner = embedder.embed_documents(["a lighthouse", "a beacon"])
    assert owner.tolist() == [0, 1]
    assert np.allclose(vectors, embedder.embed_passages(["a lighthouse", "a beacon"]), atol=1e-6)


def test_what_stands_beyond_the_models_length_counts_in_documents(embedder: SentenceEmbedder) -> None:
    hidden = LONG + " The giraffe plays the trombone at midnight." * 12
    (question,) = embedder.embed_passages(["Which animal plays the trombone?"])
    vectors, owner = embedder.embed_documents(["short", hidden])
    assert owner.tolist() == [0] + [1] * (len(owner) - 1)
    assert len(owner) > 3
    best = (vectors[1:] @ question).max()
    (truncated,) = embedder.embed_passages([hidden])
    assert best > truncated @ question + 0.2


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["word ", "antidisestablishmentarianism", "😀", "日本", "\0", "\n"]) | st.text()),
    capacity=st.integers(2, 12),
)
def test_windows_cover_all_of_a_text_within_their_capacity(
    embedder: SentenceEmbedder, parts: list[str], capacity: int
) -> None:
    tokenizer = embedder._model.tokenizer
    text = "".join(parts)
    windows = split_windows(text, tokenizer, capacity)
    assert "".join(windows) == text
    counts = [len(tokenizer(window, add_special_tokens=False)["input_ids"]) for window in windows]
    assert max(counts) <= capacity


def test_windows_of_one_text_are_about_equally_long(embedder: SentenceEmbedder) -> None:
    tokenizer = embedder._model.tokenizer
    counts = [len(tokenizer(window)["input_ids"]) for window in split_windows("word " * 260, tokenizer, 254)]
    assert len(counts) == 2
    assert abs(counts[0] - counts[1]) <= 2


def test_the_fingerprint_follows_the_content_and_not_the_folder(embedder_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other-name"
    shutil.copytree(embedder_folder, copy)
    same = SentenceEmbedder(copy, device="cpu")
    assert same.fingerprint == SentenceEmbedder(embedder_folder, device="cpu").fingerprint
    assert same.name == "other-name"
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert SentenceEmbedder(copy, device="cpu").fingerprint != same.fingerprint


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"the embedder '.*' cannot be loaded"):
        SentenceEmbedder(tmp_path)
    with pytest.raises(RetrievalError, match="batch size of 0"):
        SentenceEmbedder(tmp_path, batch_size=0)
