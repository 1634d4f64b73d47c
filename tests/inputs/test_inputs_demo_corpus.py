"""The demo corpus: short titled documents, and questions that one sentence of them answers."""

import re

import pytest

from inputs import INVENTED_PATH

DEMO = INVENTED_PATH.parent / "demo"
DOCUMENTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(DEMO.glob("*.md"))}
ANSWERS = {
    "What colour is the lighthouse of Harrowmere painted?": ("lighthouse of Harrowmere", "yellow"),
    "Which baker invented the salt cake?": ("salt cake", "Marta Quillen"),
    "Who is the captain of the Velmory ferry?": ("captain", "Signe Barlow"),
}


def test_there_are_six_short_documents_each_with_a_title_line() -> None:
    assert len(DOCUMENTS) == 6
    for name, text in DOCUMENTS.items():
        assert text.startswith("# "), name
        assert 120 <= len(text.split()) <= 200, name


def test_the_questions_are_the_three_whose_answers_are_known() -> None:
    assert (DEMO.parent / "demo_questions.txt").read_text(encoding="utf-8").splitlines() == list(ANSWERS)


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_by_exactly_one_sentence_of_the_corpus(question: str) -> None:
    subject, answer = ANSWERS[question]
    sentences = [s for text in DOCUMENTS.values() for s in re.split(r"(?<=[.!?])\s+", text)]
    holding = [" ".join(sentence.split()) for sentence in sentences if answer in " ".join(sentence.split())]
    assert len(holding) == 1
    assert subject in holding[0]
