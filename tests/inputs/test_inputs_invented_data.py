"""What the README of `inputs/` promises about our own data set, checked on the file itself."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from inputs import INVENTED_PATH, load_invented

ROWS: list[dict[str, Any]] = [json.loads(line) for line in INVENTED_PATH.read_text(encoding="utf-8").splitlines()]
BY_ID = pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])


def words(text: str) -> str:
    """Lower-case words between single spaces, so that `in` finds whole words only."""
    found = re.findall(r"[^\W_]+", text.lower().replace("'", ""))
    return f" {' '.join(found)} "


def full_text(paragraph: dict[str, Any]) -> str:
    return words(f"{paragraph['title']} {paragraph['paragraph_text']}")


def hops(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row["paragraphs"][step["paragraph_support_idx"]] for step in row["question_decomposition"]]


def distractors(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [paragraph for paragraph in row["paragraphs"] if not paragraph["is_supporting"]]


def accepted(row: dict[str, Any]) -> list[str]:
    return [words(answer) for answer in (row["answer"], *row["answer_aliases"])]


def names(row: dict[str, Any]) -> list[str]:
    """The words with a capital in the first sub-question, without its first word: what the question names."""
    first = row["question_decomposition"][0]["question"]
    capitals = re.findall(r"[A-Z][\w']*", first)[1:]
    return [words(name) for name in capitals if name not in ("A", "The")]


def test_there_are_enough_questions_over_enough_documents_with_unique_ids() -> None:
    documents = {(p["title"], p["paragraph_text"]) for row in ROWS for p in row["paragraphs"]}
    assert len(ROWS) >= 44
    assert len(documents) >= 88
    assert len({title for title, _ in documents}) == len(documents)
    assert len({row["id"] for row in ROWS}) == len({row["question"] for row in ROWS}) == len(ROWS)


@BY_ID
def test_a_row_has_musiques_official_shape(row: dict[str, Any]) -> None:
    assert list(row) == [
        "id",
        "paragraphs",
        "question",
        "question_decomposition",
        "answer",
        "answer_aliases",
        "answerable",
    ]
    assert row["answerable"] is True
    assert [paragraph["idx"] for paragraph in row["paragraphs"]] == list(range(len(row["paragraphs"])))
    for paragraph in row["paragraphs"]:
        assert list(paragraph) == ["idx", "title", "paragraph_text", "is_supporting"]
    for step in row["question_decomposition"]:
        assert list(step) == ["id", "question", "answer", "paragraph_support_idx"]


@BY_ID
def test_the_two_supporting_paragraphs_are_those_the_decomposition_points_to(row: dict[str, Any]) -> None:
    marked = {paragraph["idx"] for paragraph in row["paragraphs"] if paragraph["is_supporting"]}
    assert marked == {step["paragraph_support_idx"] for step in row["question_decomposition"]}
    assert len(marked) == len(row["question_decomposition"]) == 2
    assert 4 <= len(distractors(row)) <= 6


@BY_ID
def test_the_bridge_joins_the_two_hops_and_stands_nowhere_else(row: dict[str, Any]) -> None:
    first, second = row["question_decomposition"]
    bridge = words(first["answer"])
    assert "#1" in second["question"]
    assert bridge not in words(row["question"])
    assert all(bridge in words(paragraph["paragraph_text"]) for paragraph in hops(row))
    assert not any(bridge in full_text(paragraph) for paragraph in distractors(row))


@BY_ID
def test_the_question_leads_to_the_first_hop_only(row: dict[str, Any]) -> None:
    first, second = hops(row)
    assert names(row)
    for name in names(row):
        assert name in words(row["question"])
        assert name in full_text(first)
        assert name not in full_text(second)


@BY_ID
def test_the_answer_stands_in_the_second_hop_and_nowhere_else(row: dict[str, Any]) -> None:
    first, second = hops(row)
    assert row["question_decomposition"][1]["answer"] == row["answer"]
    assert words(row["answer"]) in words(second["paragraph_text"])
    for answer in accepted(row):
        assert answer not in words(row["question"])
        assert answer not in full_text(first)
        assert not any(answer in full_text(paragraph) for paragraph in distractors(row))


@BY_ID
def test_answers_are_short_and_aliases_are_others(row: dict[str, Any]) -> None:
    answers = [row["answer"], *row["answer_aliases"]]
    assert 1 <= len(row["answer"].split()) <= 4
    assert len(set(answers)) == len(answers)
    assert all(answer == answer.strip() != "" for answer in answers)


@BY_ID
def test_paragraphs_are_short_and_never_repeat_within_a_question(row: dict[str, Any]) -> None:
    for paragraph in row["paragraphs"]:
        assert 45 <= len(paragraph["paragraph_text"].split()) <= 80, paragraph["title"]
    assert len({paragraph["title"] for paragraph in row["paragraphs"]}) == len(row["paragraphs"])


def test_the_answers_hold_the_cases_that_scoring_stumbles_over() -> None:
    answers = [row["answer"] for row in ROWS]
    assert sum(any(c.isdigit() for c in a) or a == "seven" for a in answers) >= 8
    assert sum(a.startswith("No") for a in answers) == 2
    assert sum(a.startswith(("a ", "the ")) for a in answers) >= 5
    assert sum(bool(re.search(r"[^\w\s]", a)) for a in answers) >= 4
    assert sum(bool(row["answer_aliases"]) for row in ROWS) >= 20


def test_documents_reappear_in_other_orders() -> None:
    orders = [[paragraph["title"] for paragraph in row["paragraphs"]] for row in ROWS]
    uses = Counter(title for order in orders for title in order)
    assert min(uses.values()) >= 2
    places = {title: {order.index(title) for order in orders if title in order} for title in uses}
    assert sum(len(where) > 1 for where in places.values()) > 0.8 * len(places)


def test_supporting_paragraphs_are_not_always_first_nor_in_the_order_of_the_hops() -> None:
    pairs = [[step["paragraph_support_idx"] for step in row["question_decomposition"]] for row in ROWS]
    assert sum(min(pair) > 0 for pair in pairs) > len(pairs) // 3
    assert 10 < sum(first < second for first, second in pairs) < len(pairs) - 10


def test_the_loader_gives_every_row_as_it_stands_in_the_file() -> None:
    for row, example in zip(ROWS, load_invented(), strict=True):
        assert (example.id, example.question) == (row["id"], row["question"])
        assert example.answers == (row["answer"], *row["answer_aliases"])
        assert [(c.title, c.text, c.supporting) for c in example.contexts] == [
            (p["title"], p["paragraph_text"], p["is_supporting"]) for p in row["paragraphs"]
        ]
