"""`python -m eval.calibration`: questions over long contexts, rebuilt alike by anyone."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.calibration import WORDS_A_TOKEN, app, enlarge
from inputs import Context, distinct_contexts, load_examples, load_invented

CONTEXTS, TOKENS = 8, 600


@pytest.fixture(scope="module")
def questions() -> list[dict[str, Any]]:
    return enlarge(load_invented(), CONTEXTS, TOKENS, seed=0)


def documents_of(context: Context) -> list[str]:
    """Titles and texts of the documents that a context is made of, as they stand in the prompt."""
    return f"{context.title}\n{context.text}".split("\n\n")


def test_the_file_is_read_as_the_same_questions_with_long_contexts_of_whole_documents(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "calibration.json"
    result = CliRunner().invoke(app, ["--out", str(out)])
    assert result.exit_code == 0, result.output
    invented = load_invented()
    world = {f"{document.title}\n{document.text}" for document in distinct_contexts(invented)}
    longest = max(len(document.split()) for document in world)
    for enlarged, example in zip(load_examples(out), invented, strict=True):
        assert (enlarged.question, enlarged.answers) == (example.question, example.answers)
        assert len(enlarged.contexts) == CONTEXTS
        used = [document for context in enlarged.contexts for document in documents_of(context)]
        assert len(set(used)) == len(used)
        assert set(used) <= world
        for context in enlarged.contexts:
            words = len(f"{context.title} {context.text}".split())
            assert TOKENS * WORDS_A_TOKEN <= words < TOKENS * WORDS_A_TOKEN + longest


def test_supporting_documents_stand_in_different_contexts_at_places_that_differ(questions) -> None:
    places = set()
    for question, example in zip(questions, load_invented(), strict=True):
        groups = [documents_of(Context(**context)) for context in question["ctxs"]]
        found = [
            (number, group.index(document))
            for document in (f"{c.title}\n{c.text}" for c in example.contexts if c.supporting)
            for number, group in enumerate(groups)
            if document in group
        ]
        assert len(found) == len({number for number, _ in found}) == 2
        places.update(found)
    assert {number for number, _ in places} == set(range(CONTEXTS))
    assert len({place for _, place in places}) > 3


def test_the_seed_repeats_the_draw_and_every_question_has_contexts_of_its_own(questions) -> None:
    assert enlarge(load_invented(), CONTEXTS, TOKENS, seed=0) == questions
    assert enlarge(load_invented(), CONTEXTS, TOKENS, seed=1) != questions
    filled = [[context["title"] for context in question["ctxs"]] for question in questions]
    assert len({tuple(titles) for titles in filled}) == len(filled)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "16"], "do not make 16 contexts of 600; give fewer --contexts or --tokens"),
        (["--out", "/dev/null/file"], "--out /dev/null/file cannot be written"),
    ],
)
def test_what_cannot_be_made_is_one_sentence_and_exit_code_2(tmp_path: Path, arguments, message) -> None:
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "out.json"), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
