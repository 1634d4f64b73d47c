"""Where sentences are taken to end."""

import pytest

from retrieval.sentences import sentence_ends


def split(text: str) -> list[str]:
    ends = sentence_ends(text)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    "sentences",
    [
        ["One.", " Two!", " Three?"],
        ["He met Dr. Smith at 3.14 p.m. on example.org.", " Then J. R. Tolkien left."],
        ["A line.\n", "Another.\n\n", "Third"],
        ["A heading\n\n", "Its text."],
        ["日本語。", "次の文。"],
        ["هل هذا؟", " نعم."],
        ['She said "go."', " He went…", " Away"],
        ["No end"],
        ["\n\n\nLeading.", " Trailing.\n \n  "],
        [" \n "],
    ],
)
def test_sentences_end_where_a_reader_would_end_them(sentences: list[str]) -> None:
    assert split("".join(sentences)) == sentences


def test_an_empty_text_has_no_sentences() -> None:
    assert sentence_ends("") == []


@pytest.mark.parametrize("text", ["." * 300_000, "\n " * 150_000 + "x", ". " * 150_000, '."' * 150_000])
def test_hostile_text_is_split_all_the_same(text: str) -> None:
    assert "".join(split(text)) == text
