"""Retrieval on our own data is far above random, and gold is what it should be."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from eval.retrieval import evaluate_retrieval
from eval.retrieval_quality import Evaluation, evaluate, gold_contexts, holds_answer, index_contexts, search
from inputs import Context, Example, distinct_contexts, load_invented
from retrieval.embedding import SentenceEmbedder


def run_command(*arguments: str) -> tuple[int, str, str]:
    app = Typer()
    app.command()(evaluate_retrieval)
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.stdout, result.stderr


def evaluated(examples: list[Example], embedder: SentenceEmbedder, k: int) -> Evaluation:
    index = index_contexts(distinct_contexts(examples), embedder)
    return evaluate(examples, search(examples, index, k), len(index), k, seed=0)


def test_retrieval_on_the_invented_questions_is_far_above_random(embedder: SentenceEmbedder) -> None:
    examples = load_invented()
    evaluation = evaluated(examples, embedder, k=5)
    assert evaluation.questions == len(examples)
    assert evaluation.contexts == len(distinct_contexts(examples)) >= 80
    for metric in evaluation.metrics.values():
        assert metric.retriever.low > 4 * metric.random_expected
        assert metric.random_drawn.mean == pytest.approx(metric.random_expected, abs=0.02)


def test_gold_are_supporting_contexts_or_those_that_hold_an_answer() -> None:
    marked = (Context("", "Oslo.", False), Context("", "A tower.", True))
    unmarked = (Context("", "It lies in oslo , he said."), Context("Oslo", "A tower."))
    assert gold_contexts(Example("1", "Where?", ("Oslo",), marked)) == [marked[1]]
    assert gold_contexts(Example("2", "Where?", ("Bergen", "The Oslo"), unmarked)) == [unmarked[0]]


@pytest.mark.parametrize(
    ("text", "answer", "held"),
    [
        ("She left Nazareth's gate.", "Nazareth", True),
        ("three national forests", "National Forest", True),
        ("in the U.S.A. today", "USA", True),
        ("Norway is cold", "no", False),
        ("a category", "cat", False),
        ("the answer", "the", False),
    ],
)
def test_an_answer_is_held_as_whole_words(text: str, answer: str, held: bool) -> None:
    assert holds_answer(text, answer) is held


def test_random_choice_is_counted_by_hand(embedder: SentenceEmbedder) -> None:
    contexts = tuple(Context("", text, place < 2) for place, text in enumerate(["Cats.", "Dogs.", "Tax.", "Sea."]))
    evaluation = evaluated([Example("1", "Cats?", ("x",), contexts)], embedder, k=2)
    # Of 6 pairs among 4 contexts, 1 holds neither of the 2 gold ones.
    assert evaluation.metrics["hit@2"].random_expected == pytest.approx(5 / 6)
    assert evaluation.metrics["recall@2"].random_expected == pytest.approx(1 / 2)
    assert evaluation.metrics["recall@2"].retriever.mean == 1.0


def test_the_command_leaves_out_and_counts_questions_without_gold_and_names_no_folder(tmp_path: Path) -> None:
    data = [
        {"question": "Which animal barks?", "answers": ["dog"], "ctxs": [{"title": "", "text": "A dog barks."}]},
        {"question": "Who?", "answers": ["nobody"], "ctxs": [{"title": "", "text": "The sea is deep."}]},
    ]
    (tmp_path / "data.json").write_text(json.dumps(data))
    out = tmp_path / "results" / "out.json"
    code, printed, _ = run_command("--data", str(tmp_path / "data.json"), "--out", str(out))
    report = json.loads(out.read_text())
    assert code == 0
    assert "hit@2" in printed
    assert (report["questions"], report["left_out"], report["contexts"]) == (1, 1, 2)
    assert report["data"]["name"] == "data.json"
    assert str(tmp_path) not in out.read_text()
    assert {"versions", "code", "seed", "arguments", "device", "model"} <= set(report)


def test_the_command_answers_bad_input_with_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    for path in (tmp_path / "missing.json", tmp_path / "bad.json"):
        code, _, error = run_command("--data", str(path))
        assert code == 2
        assert path.name in error
        assert error.count("\n") == 1
