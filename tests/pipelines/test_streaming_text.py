"""`Detokenizer`: text that comes in pieces, takes nothing back and stops before a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipelines.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_rag_model):
    return AutoTokenizer.from_pretrained(tiny_rag_model)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def pieces_of(detokenizer, ids, size=1):
    pieces = [detokenizer.add(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.finish()]


def test_the_pieces_are_the_text(tokenizer):
    text = "The mill of Harrow burned in 1841."
    pieces = pieces_of(Detokenizer(tokenizer), ids_of(tokenizer, text))
    assert "".join(pieces) == text
    assert sum(map(bool, pieces)) > 5


def test_a_character_is_given_out_whole_or_not_yet(tokenizer):
    text = "a\N{GRINNING FACE}b\N{ARABIC LETTER SEEN}\N{CJK UNIFIED IDEOGRAPH-4E2D}"
    ids = ids_of(tokenizer, text)
    assert len(ids) > len(text)
    pieces = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_that_never_ends_is_given_out_as_it_is_at_the_end(tokenizer):
    ids = ids_of(tokenizer, "a\N{GRINNING FACE}")[:-1]
    *pieces, last = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == "a"
    assert set(last) == {"\N{REPLACEMENT CHARACTER}"}


def test_special_tokens_are_no_text(tokenizer):
    ids = [*ids_of(tokenizer, "yes"), tokenizer.eos_token_id]
    assert "".join(pieces_of(Detokenizer(tokenizer), ids)) == "yes"


def test_nothing_from_the_first_stop_string_on_is_given_out(tokenizer):
    ids = ids_of(tokenizer, "one two three\nfour")
    for stop, expected in ((("three",), "one two "), (("two", "one"), ""), (("\n",), "one two three")):
        detokenizer = Detokenizer(tokenizer, stop)
        assert "".join(pieces_of(detokenizer, ids)) == expected == detokenizer.text()


def test_text_that_may_become_a_stop_string_is_held_back_until_it_is_known(tokenizer):
    detokenizer = Detokenizer(tokenizer, ("two three",))
    given_out = ""
    for token in ids_of(tokenizer, "one two thr"):
        given_out += detokenizer.add([token])
    assert given_out == "one "
    assert detokenizer.add(ids_of(tokenizer, "ow")) == "two throw"


def test_a_stop_string_that_ends_inside_a_character_of_several_tokens_is_held_back_too(tokenizer):
    """While the last character is incomplete, what stands before it may still be the stop string's beginning."""
    stop = "b\N{GRINNING FACE}"
    pieces = pieces_of(Detokenizer(tokenizer, (stop,)), ids_of(tokenizer, f"a{stop}c"))
    assert "".join(pieces) == "a"


def test_no_ids_are_no_text(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert (detokenizer.add([]), detokenizer.finish(), detokenizer.text()) == ("", "", "")


TEXTS = st.text(
    alphabet="ab \n.\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}\N{ARABIC LETTER SEEN}", max_size=12
)
STOPS = st.lists(st.text(alphabet="ab.\N{GRINNING FACE}", min_size=1, max_size=3), max_size=2)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, stops=STOPS, size=st.integers(1, 3), cut=st.integers(0, 3))
def test_however_the_ids_come_the_pieces_are_the_text_before_the_first_stop(tokenizer, text, stops, size, cut):
    ids = ids_of(tokenizer, text)
    ids = ids[: len(ids) - cut]
    whole = tokenizer.decode(ids)
    ends = [whole.find(stop) for stop in stops if stop in whole]
    expected = whole[: min(ends)] if ends else whole
    detokenizer = Detokenizer(tokenizer, stops)
    given_out = ""
    for piece in pieces_of(detokenizer, ids, size):
        given_out += piece
        assert expected.startswith(given_out)
    assert given_out == expected == detokenizer.text()
