"""The index: ranking, changes without a rebuild, saving and refusing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrieval.chunk import Chunk
from retrieval.chunking import TokenChunker
from retrieval.documents import Document
from retrieval.embedding import SentenceEmbedder
from retrieval.errors import RetrievalError
from retrieval.index import CorpusIndex
from retrieval.retriever import Retriever
from retrieval.storage import MANIFEST

FACTS = {
    "dog": "A dog barks at the postman.",
    "sea": "The lighthouse keeper watches the sea.",
    "tax": "The tax law was changed in 1921.",
    "bread": "Bread is baked from flour and water.",
    "moon": "The moon moves the tides.",
}


def whole(name: str, text: str) -> Chunk:
    return Chunk.whole(Document(name, text))


@pytest.fixture
def index(embedder: SentenceEmbedder) -> CorpusIndex:
    index = CorpusIndex(embedder)
    index.add([whole(name, text) for name, text in FACTS.items()])
    return index


def found(index: CorpusIndex, query: str, k: int = 5) -> list[tuple[str, float]]:
    return [(hit.chunk.document_id, hit.score) for hit in index.search(query, k)]


def test_the_chunk_that_answers_comes_first(index: CorpusIndex) -> None:
    for name, query in {"dog": "Which animal barks?", "bread": "What is bread made of?"}.items():
        assert found(index, query)[0][0] == name
    scores = [score for _, score in found(index, "Which animal barks?")]
    assert scores == sorted(scores, reverse=True)


def test_more_than_there_is_gives_all(index: CorpusIndex) -> None:
    assert {name for name, _ in found(index, "anything", 1000)} == set(FACTS)


def test_a_long_chunk_is_scored_by_its_best_passage_and_found_once(embedder: SentenceEmbedder) -> None:
    filler = " ".join(f"Item {n} lies on shelf {n * 3}." for n in range(120))
    index = CorpusIndex(embedder)
    index.add([whole("long", filler + " A giraffe plays the trombone."), whole("short", FACTS["tax"])])
    vectors, owner = embedder.embed_documents([index.chunks[0].text])
    question = embedder.embed_passages(["Which animal plays the trombone?"])[0]
    hits = found(index, "Which animal plays the trombone?", 2)
    assert len(owner) > 3
    assert hits[0] == ("long", pytest.approx((vectors @ question).max(), abs=1e-5))
    assert hits[1][0] == "short"


def test_ranking_equals_comparing_with_every_passage(embedder: SentenceEmbedder) -> None:
    texts = [" ".join(f"{word} {n * m}" for m in range(40 * (n % 4 + 1))) for n, word in enumerate("abcdefghijkl")]
    index = CorpusIndex(embedder)
    index.add([whole(str(n), text) for n, text in enumerate(texts)])
    vectors, owner = embedder.embed_documents(texts)
    scores = vectors @ embedder.embed_passages(["c 4 f 10"])[0]
    expected = np.array([scores[owner == n].max() for n in range(len(texts))])
    for k in (1, 3, 12):
        hits = found(index, "c 4 f 10", k)
        assert [score for _, score in hits] == pytest.approx(np.sort(expected)[::-1][:k], abs=1e-5)


def test_equal_scores_are_ordered_by_chunk_id_whatever_the_order_of_adding(embedder: SentenceEmbedder) -> None:
    # The embedder ignores case, so all of these have one vector.
    chunks = [whole(str(n), text) for n, text in enumerate(("a dog", "A dog", "A DOG", "a Dog", "a dOg", "A doG"))]
    for order in (chunks, chunks[::-1]):
        index = CorpusIndex(embedder)
        index.add(order)
        for k in (1, 2, 6):
            hits = index.search("a dog", k)
            assert [hit.chunk.id for hit in hits] == sorted(chunk.id for chunk in chunks)[:k]


def test_a_text_in_several_documents_is_found_once_and_stays_until_the_last_is_deleted(
    index: CorpusIndex,
) -> None:
    assert index.add([whole("copy", FACTS["dog"])]) == 1
    assert len(index) == len(FACTS)
    assert [name for name, _ in found(index, "Which animal barks?")].count("dog") == 1
    assert index.delete(["dog"]) == 1
    assert found(index, "Which animal barks?")[0][0] == "copy"
    index.delete(["copy"])
    assert "dog" not in [hit.chunk.text[2:5] for hit in index.search("Which animal barks?", 5)]
    assert index.document_ids == ("sea", "tax", "bread", "moon")


def test_a_chunk_added_again_is_passed_over(index: CorpusIndex) -> None:
    assert index.add([whole("dog", FACTS["dog"]), whole("new", "News."), whole("new", "News.")]) == 1
    assert len(index) == len(FACTS) + 1


def test_a_changed_document_is_refused_until_the_old_one_is_deleted(index: CorpusIndex) -> None:
    changed = [whole("other", "Another."), whole("dog", "A dog sleeps.")]
    with pytest.raises(RetrievalError, match="document 'dog' is in the index with another text"):
        index.add(changed)
    assert "other" not in index.document_ids
    index.delete("dog")
    assert index.add(changed) == 2


def test_deleting_gives_what_never_adding_gives(embedder: SentenceEmbedder, index: CorpusIndex) -> None:
    index.delete(["sea", "moon"])
    fresh = CorpusIndex(embedder)
    fresh.add([whole(name, FACTS[name]) for name in ("dog", "tax", "bread")])
    after, never = (found(one, "What moves the tides?") for one in (index, fresh))
    assert [name for name, _ in after] == [name for name, _ in never]
    assert [score for _, score in after] == pytest.approx([score for _, score in never], abs=1e-5)
    index.add([whole("moon", FACTS["moon"])])
    assert found(index, "What moves the tides?")[0][0] == "moon"


def test_deleting_an_unknown_document_is_refused_and_deletes_nothing(index: CorpusIndex) -> None:
    with pytest.raises(RetrievalError, match="document 'nobody' is not in the index"):
        index.delete(["dog", "nobody"])
    assert set(index.document_ids) == set(FACTS)


def test_an_empty_question_an_empty_index_and_an_impossible_k_are_refused(
    embedder: SentenceEmbedder, index: CorpusIndex
) -> None:
    with pytest.raises(RetrievalError, match="question is empty"):
        index.search(" \n", 3)
    with pytest.raises(RetrievalError, match="k of 1 or more"):
        index.search("why", 0)
    with pytest.raises(RetrievalError, match="index is empty"):
        CorpusIndex(embedder).search("why", 3)


def test_a_saved_index_is_loaded_with_all_it_had(embedder: SentenceEmbedder, tokenizer: Any, tmp_path: Path) -> None:
    text = "👨‍👩‍👧 שלום \0 e\u0301\u2028 dog. " * 30
    chunker = TokenChunker(tokenizer, 64)
    index = CorpusIndex(embedder)
    index.add(chunker.chunk(Document("d", text, "Títle", {"page": 3, "tags": ["a"]})))
    index.add(chunker.chunk(Document("copy", text, "Títle")))
    index.save(tmp_path / "index")
    loaded = CorpusIndex.load(tmp_path / "index", embedder, chunker.tokenizer_fingerprint)
    assert loaded.chunks == index.chunks
    assert loaded.search("dog", 9) == index.search("dog", 9)
    assert loaded.document_ids == ("d", "copy")
    loaded.delete(["d"])
    loaded.add(chunker.chunk(Document("e", FACTS["moon"])))
    assert loaded.search("What moves the tides?", 1)[0].chunk.document_id == "e"


def test_an_empty_index_can_be_saved_and_filled_later(embedder: SentenceEmbedder, tmp_path: Path) -> None:
    CorpusIndex(embedder).save(tmp_path)
    loaded = CorpusIndex.load(tmp_path, embedder)
    loaded.add([whole("dog", FACTS["dog"])])
    assert found(loaded, "dog")[0][0] == "dog"


def test_saving_again_replaces_the_index_and_leaves_no_old_files(index: CorpusIndex, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not ours")
    index.save(tmp_path)
    index.delete(["dog"])
    index.save(tmp_path)
    assert "dog" not in CorpusIndex.load(tmp_path, index._embedder).document_ids
    names = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert names == [".lock", "chunks", "notes.txt", "passages", "retrieval"]


def test_metadata_that_json_does_not_know_is_saved_as_text(embedder: SentenceEmbedder, tmp_path: Path) -> None:
    index = CorpusIndex(embedder)
    index.add([Chunk.whole(Document("d", "Text.", "", {"path": Path("a/b")}))])
    index.save(tmp_path)
    assert CorpusIndex.load(tmp_path, embedder).chunks[0].metadata == {"path": "a/b"}


def test_an_index_of_another_embedder_is_refused_naming_both(index: CorpusIndex, tmp_path: Path) -> None:
    index.save(tmp_path)
    other = SimpleNamespace(name="other-model", fingerprint="f00", dimension=index._embedder.dimension)
    with pytest.raises(RetrievalError, match=rf"with the embedder {index._embedder.name} .* not with other-model"):
        CorpusIndex.load(tmp_path, other)  # type: ignore[arg-type]


def test_an_index_cut_with_another_tokenizer_is_refused(
    embedder: SentenceEmbedder, tokenizer: Any, tmp_path: Path
) -> None:
    index = CorpusIndex(embedder)
    index.add(TokenChunker(tokenizer).chunk(Document("d", "Text.")))
    index.save(tmp_path)
    with pytest.raises(RetrievalError, match=r"are of the tokenizer .* not other"):
        CorpusIndex.load(tmp_path, embedder, "other")
    with pytest.raises(RetrievalError, match="document 'e' are of another tokenizer"):
        index.add([whole("e", "Another.")])


def test_an_index_of_another_version_is_refused(index: CorpusIndex, tmp_path: Path) -> None:
    index.save(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(RetrievalError, match="format version 99, this program reads 1"):
        CorpusIndex.load(tmp_path, index._embedder)


@pytest.mark.parametrize("pattern", ["passages-*", "chunks-*"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_damaged_index_is_refused_naming_the_file(
    index: CorpusIndex, tmp_path: Path, pattern: str, harm: str
) -> None:
    index.save(tmp_path)
    (path,) = tmp_path.glob(pattern)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flip" else data[:-1])
    with pytest.raises(RetrievalError, match=rf"is damaged \({path.name}\); build it again"):
        CorpusIndex.load(tmp_path, index._embedder)


@pytest.mark.parametrize("manifest", ["", "[]", "{", '{"format": "cacheblend-retrieval-index", "version": 1}'])
def test_a_damaged_manifest_is_refused(index: CorpusIndex, tmp_path: Path, manifest: str) -> None:
    index.save(tmp_path)
    (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(RetrievalError, match="is damaged"):
        CorpusIndex.load(tmp_path, index._embedder)


def test_a_folder_that_is_a_file_or_holds_no_index_is_refused(index: CorpusIndex, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RetrievalError, match="cannot be written"):
        index.save(tmp_path / "file")
    for folder in ("file", "nothing"):
        with pytest.raises(RetrievalError, match="holds no retrieval index"):
            CorpusIndex.load(tmp_path / folder, index._embedder)


def test_the_retriever_separates_hits_from_what_lies_beyond_and_counts_calls(index: CorpusIndex) -> None:
    retriever = Retriever(index)
    assert retriever.calls == 0
    result = retriever.retrieve("Which animal barks?", 2, candidates=2)
    ranked = index.search("Which animal barks?", 4)
    assert (list(result.hits), list(result.beyond)) == (ranked[:2], ranked[2:])
    assert retriever.retrieve("Which animal barks?", 2).beyond == ()
    assert retriever.calls == 2
    for k, candidates in ((0, 1), (1, -1)):
        with pytest.raises(RetrievalError, match="cannot be retrieved"):
            retriever.retrieve("why", k, candidates)
