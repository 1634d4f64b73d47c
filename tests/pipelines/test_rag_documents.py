"""The corpus of a pipeline: documents come and go, one at a time or none at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.errors import PipelineError
from retrieval.documents import Document
from retrieval.errors import RetrievalError

MILL = Document("mill", "The mill of Harrow burned in 1841.")
FERRY = Document("ferry", "The ferry at Oss sank in 1902.")
TOWER = Document("tower", "Ada Quill built the tower of Brenn.")
QUESTION = "Who built the tower of Brenn?"


def found(pipeline, question=QUESTION, top_k=1):
    return [source.document_id for source in pipeline.run(question, top_k=top_k).sources]


def known(pipeline):
    return [chunk.document_id for chunk in pipeline.chunks]


@pytest.mark.parametrize("searched_before", [False, True])
def test_an_added_document_is_found_and_a_deleted_one_is_not(make_rag, searched_before):
    pipeline = make_rag([MILL, FERRY])
    if searched_before:
        assert found(pipeline) != ["tower"]
    pipeline.add_documents([TOWER])
    assert found(pipeline) == ["tower"]
    pipeline.delete_documents(["tower"])
    assert "tower" not in found(pipeline, top_k=3)
    assert known(pipeline) == ["mill", "ferry"]
    pipeline.add_documents([TOWER])
    assert found(pipeline) == ["tower"]


def test_the_kv_of_a_deleted_document_stays_for_when_it_comes_back(make_rag):
    pipeline = make_rag([MILL, TOWER])
    pipeline.precompute()
    pipeline.delete_documents(["tower"])
    assert pipeline.precompute().chunks == 1
    pipeline.add_documents([TOWER])
    assert pipeline.precompute().computed == 0


def test_a_document_that_is_there_is_passed_over(make_rag):
    pipeline = make_rag([MILL, MILL, "The same text.", "The same text."])
    pipeline.add_documents([MILL])
    assert len(pipeline.chunks) == 2


@pytest.mark.parametrize("searched_before", [False, True])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Document("mill", "Another text."), "'mill' is used for two different texts"),
        ("  ", "no text"),
        (7, "int is no document"),
    ],
)
def test_of_documents_with_a_wrong_one_none_is_added_and_the_others_can_be_added_later(
    make_rag, searched_before, wrong, words
):
    pipeline = make_rag([MILL, FERRY])
    if searched_before:
        found(pipeline)
    with pytest.raises(RetrievalError, match=words):
        pipeline.add_documents([TOWER, wrong])
    assert known(pipeline) == ["mill", "ferry"]
    pipeline.add_documents([TOWER])
    assert found(pipeline) == ["tower"]


@pytest.mark.parametrize("searched_before", [False, True])
def test_of_names_with_an_unknown_one_none_is_deleted(make_rag, searched_before):
    pipeline = make_rag([MILL, TOWER])
    if searched_before:
        found(pipeline)
    with pytest.raises(RetrievalError, match="'nowhere' is not in the corpus"):
        pipeline.delete_documents(["tower", "nowhere"])
    assert found(pipeline) == ["tower"]
    pipeline.delete_documents(["tower", "tower"])
    assert known(pipeline) == ["mill"]


def test_a_single_string_or_mapping_is_not_a_list_of_documents(make_rag):
    for wrong in ("The mill burned.", {"text": "The mill burned."}, b"The mill burned."):
        with pytest.raises(PipelineError, match="give a list of documents"):
            make_rag(wrong)


def test_documents_can_be_added_and_deleted_while_others_ask_and_precompute(make_rag):
    pipeline = make_rag([MILL, FERRY, TOWER])

    def change(number):
        for turn in range(5):
            name = f"{number}-{turn}"
            pipeline.add_documents([Document(name, f"Note {name} says nothing of towers.")])
            pipeline.delete_documents([name])

    with ThreadPoolExecutor(4) as pool:
        changes = [pool.submit(change, number) for number in range(2)]
        answers = [pool.submit(found, pipeline) for _ in range(4)]
        precomputed = [pool.submit(pipeline.precompute) for _ in range(3)]
        for each in [*changes, *precomputed]:
            each.result(60)
        assert [answer.result(60) for answer in answers] == [["tower"]] * 4
    assert known(pipeline) == ["mill", "ferry", "tower"]


def test_the_index_is_kept_for_exactly_these_documents(make_rag, tmp_path):
    make_rag([MILL, TOWER], index_dir=tmp_path).run(QUESTION)
    kept = list(tmp_path.iterdir())
    assert len(kept) == 1
    assert found(make_rag([MILL, TOWER], index_dir=tmp_path)) == ["tower"]
    assert list(tmp_path.iterdir()) == kept
    assert found(make_rag([MILL, FERRY], index_dir=tmp_path), top_k=2) != ["tower"]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_index_that_cannot_be_kept_is_no_reason_not_to_answer(make_rag):
    assert found(make_rag([MILL, TOWER], index_dir="/proc/indexes")) == ["tower"]
