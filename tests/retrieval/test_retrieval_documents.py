"""Documents: what is accepted, what is refused, what is kept."""

from types import SimpleNamespace
from typing import Any

import pytest

from retrieval.documents import Document, from_any
from retrieval.errors import RetrievalError


class FakeLlamaNode:
    """LlamaIndex's node shape without a ``text`` attribute."""

    node_id = "node-1"
    metadata = {"title": "Towers", "page": 3}

    def get_content(self) -> str:
        return "A tower."


ACCEPTED = {
    "document": (Document("x", "T", "t", {"a": 1}), Document("x", "T", "t", {"a": 1})),
    "mapping": ({"id": 7, "text": "T", "title": "t", "url": "u"}, Document("7", "T", "t", {"url": "u"})),
    "mapping_metadata": ({"id": "a", "text": "T", "metadata": {"b": 2}}, Document("a", "T", "", {"b": 2})),
    "langchain": (
        SimpleNamespace(page_content="T", metadata={"title": "t"}, id="lc"),
        Document("lc", "T", "t", {"title": "t"}),
    ),
    "llama_text": (SimpleNamespace(text="T", metadata={}, id_="li"), Document("li", "T")),
    "llama_content": (
        FakeLlamaNode(),
        Document("node-1", "A tower.", "Towers", {"title": "Towers", "page": 3}),
    ),
    "llama_scored": (
        SimpleNamespace(node=FakeLlamaNode(), score=0.5),
        Document("node-1", "A tower.", "Towers", {"title": "Towers", "page": 3}),
    ),
}


@pytest.mark.parametrize("shape", ACCEPTED)
def test_a_document_of_every_known_shape_is_accepted(shape: str) -> None:
    given, expected = ACCEPTED[shape]
    assert from_any(given) == expected


def test_a_langchain_document_without_an_id_gets_one_from_its_content() -> None:
    shaped = SimpleNamespace(page_content="T", metadata={}, id=None)
    assert from_any(shaped) == from_any("T")
    assert from_any(shaped).id


def test_an_absent_id_depends_on_title_and_text_alone() -> None:
    assert Document("", "one").id == Document("", "one", "", {"m": 1}).id
    ids = {
        Document("", "one").id,
        Document("", "two").id,
        Document("", "one", "t").id,
        Document("", "ne", "o").id,
    }
    assert len(ids) == 4


@pytest.mark.parametrize(
    "empty",
    [
        {"id": "lonely", "text": ""},
        {"id": "lonely", "text": " \n\t"},
        {"id": "lonely"},
        {"id": "lonely", "text": None},
        SimpleNamespace(page_content="", metadata={}, id="lonely"),
        SimpleNamespace(text=None, metadata={}, node_id="lonely"),
    ],
)
def test_a_document_without_text_is_refused_by_its_id(empty: Any) -> None:
    with pytest.raises(RetrievalError, match="document 'lonely' has no text"):
        from_any(empty)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (17, "a int is no document"),
        (None, "a NoneType is no document"),
        ({"id": "d", "text": 5}, "document 'd' has a text of type int"),
        ({"id": "d", "text": "T", "title": ["t"]}, "document 'd' has a title of type list"),
        ({"id": "d", "text": "T", "metadata": "m"}, "document 'd' has metadata of type str"),
    ],
)
def test_what_is_no_document_is_refused_by_its_type(wrong: Any, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        from_any(wrong)


def test_text_is_kept_exactly_with_emoji_right_to_left_script_and_nul() -> None:
    text = " 👨‍👩‍👧 שלום \0 e\u0301\r\n\u2028"
    assert Document("d", text).text == text


def test_surrogates_are_repaired_so_that_no_tokenizer_meets_one() -> None:
    assert Document("d", "a\ud83d\ude00b").text == "a😀b"
    assert Document("\udc00", "a\ud800b", "\ud800").text == "a\ufffdb"
