"""Answer scores against cases worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from eval.errors import EvalError
from eval.scoring import agrees, exact_match, f1, first_line, normalize_answer, token_f1


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one id a letter that puts a BOS before every text, so that F1 is counted by eye."""
    vocabulary = {letter: index for index, letter in enumerate("?^ abcdefghijklmnopqrstuvwxyzé0123456789")}
    core = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", bos_token="^")
    tokenizer.backend_tokenizer.post_processor = _bos_first()
    assert tokenizer.encode("ab")[0] == tokenizer.bos_token_id
    return tokenizer


def _bos_first():
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="^ $A", special_tokens=[("^", 1)])


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The Beatles", "beatles"),
        ("  An   apple\ta\nday ", "apple day"),
        ("U.S.A.", "usa"),
        ("the, a; an!", ""),
        ("...", ""),
        ("", ""),
        ("Theatre and another", "theatre and another"),
        ("rock-and-roll", "rockandroll"),
        # Punctuation goes first, so "a-ha" is one word and "the" inside "a.the" is no article.
        ("A-ha", "aha"),
        ("a.the", "athe"),
        ("Österreich, Café", "österreich café"),
        ("東京タワー", "東京タワー"),
        # Only ASCII punctuation goes, as in the official script.
        ("“Norway”", "“norway”"),
        ("$1,000,000", "1000000"),
    ],
)
def test_normalisation_is_the_official_one(text: str, normalised: str) -> None:
    assert normalize_answer(text) == normalised


@pytest.mark.parametrize(
    ("prediction", "answers", "em", "word_f1"),
    [
        ("Exeter College", ["Exeter College"], 1.0, 1.0),
        ("exeter college.", ["The Exeter College"], 1.0, 1.0),
        # 2 shared words of 4 predicted and 2 gold: precision 1/2, recall 1.
        ("It is Exeter College", ["Exeter College"], 0.0, 2 / 3),
        # 1 shared of 1 and 2: precision 1, recall 1/2.
        ("Exeter", ["Exeter College"], 0.0, 2 / 3),
        # A word counts as often as both have it: 1 shared of 3 and 1.
        ("no no no", ["no"], 0.0, 0.5),
        ("Paris", ["London"], 0.0, 0.0),
        # An alias may be the better one, wherever it stands.
        ("NYC", ["New York City", "NYC"], 1.0, 1.0),
        ("York City", ["NYC", "New York City", "the Big Apple"], 0.0, 0.8),
        # "Norway" is not "No".
        ("Norway", ["Norway"], 1.0, 1.0),
        ("Norway", ["No"], 0.0, 0.0),
        ("No", ["Norway"], 0.0, 0.0),
        ("November 1918", ["November 1918"], 1.0, 1.0),
        # Nothing predicted, and nothing left of one side or of both.
        ("", ["Exeter College"], 0.0, 0.0),
        ("The.", ["Exeter College"], 0.0, 0.0),
        ("Exeter College", ["the"], 0.0, 0.0),
        ("", ["The"], 1.0, 1.0),
        ("a, an!", ["the ..."], 1.0, 1.0),
        ("", ["Exeter College", "A"], 1.0, 1.0),
        # Unicode is compared as it is.
        ("café", ["Café"], 1.0, 1.0),
        ("cafe", ["café"], 0.0, 0.0),
        ("東京", ["東京"], 1.0, 1.0),
        ("🎉 party", ["party"], 0.0, 2 / 3),
    ],
)
def test_exact_match_and_f1_of_cases_worked_by_hand(prediction, answers, em, word_f1) -> None:
    assert exact_match(prediction, answers) == em
    assert f1(prediction, answers) == pytest.approx(word_f1)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("abc", ["abc"], 1.0),
        # 2 shared letters of 2 and 3.
        ("ab", ["abc"], 0.8),
        ("Norway", ["Norway"], 1.0),
        # CacheBlend's own script would cut "Norway" to "No" and score 1: 2 shared letters of 6 and 2.
        ("Norway", ["no"], 0.5),
        ("Yesterday", ["Yesterday"], 1.0),
        # The first line that is not blank counts.
        ("\n\nabc\nxyz", ["abc"], 1.0),
        ("The abc.", ["ABC"], 1.0),
        ("", ["abc"], 0.0),
        ("", ["the"], 1.0),
        ("é", ["É"], 1.0),
        ("xyz", ["abc", "xy"], 0.8),
    ],
)
def test_token_f1_of_cases_worked_by_hand(letters, prediction, answers, expected) -> None:
    assert token_f1(prediction, answers, letters) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "line"),
    [
        ("Paris", "Paris"),
        ("\n \n  Paris \nBecause it is.", "Paris"),
        ("Paris\r\nFrance", "Paris"),
        ("", ""),
        (" \n ", ""),
        ("Norway\nNo", "Norway"),
    ],
)
def test_the_first_line_is_the_first_that_is_not_blank(prediction: str, line: str) -> None:
    assert first_line(prediction) == line


def test_answers_agree_when_their_normalised_first_lines_are_equal() -> None:
    assert agrees("The Paris.\nIt is big.", "paris")
    assert agrees("", "...")
    assert not agrees("No", "Norway")
    assert not agrees("Paris France", "Paris")


@pytest.mark.parametrize("answers", [[], "Paris"])
def test_a_question_without_a_list_of_answers_is_refused(answers) -> None:
    for score in (exact_match, f1):
        with pytest.raises(EvalError, match="at least one answer"):
            score("Paris", answers)


@given(st.text(max_size=40), st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_scores_lie_between_0_and_1_and_an_exact_match_has_full_f1(prediction, answers) -> None:
    assert 0.0 <= f1(prediction, answers) <= 1.0
    assert exact_match(prediction, answers) <= f1(prediction, answers)
    assert f1(prediction, [*answers, prediction]) == exact_match(prediction, [prediction]) == 1.0
