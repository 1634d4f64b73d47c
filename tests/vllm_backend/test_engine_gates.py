"""The gates G1 to G8 on vLLM with the connector, in fp32 on tiny random models.

Every blended answer is compared with the reference runner recomputing the very rows that the engine did; every plain
one with a full prefill by the reference runner, which has gates of its own against transformers alone.
"""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

import torch
from engine_bench import Ask, error
from engine_cases import GRADUAL, SELECTORS, prompt
from engine_configs import MOVED_TOLERANCE, TOLERANCE

from cacheblend.relocation import rotate_keys
from cacheblend.vllm_backend.rotary import RotaryTables
from kvstore.errors import UnavailableReason


def test_g1_moved_keys_equal_keys_encoded_at_the_place(engine):
    from transformers import AutoConfig

    chunk, far = engine.ids(40, 100), engine.ids(700, 101)
    engine.collect([chunk])
    engine.collect([chunk], far)
    near_keys, near_values = engine.stored_layer(chunk, (), 0)
    far_keys, far_values = engine.stored_layer(chunk, far, 0)
    place = torch.arange(len(chunk))
    turn = RotaryTables(AutoConfig.from_pretrained(engine.folder), torch.device("cpu")).between(place, place + len(far))
    # Only layer 0 does not depend on what came before.
    assert (rotate_keys(near_keys, *turn) - far_keys).abs().max() <= MOVED_TOLERANCE
    assert (near_values - far_values).abs().max() <= MOVED_TOLERANCE


def test_g2_one_chunk_where_it_was_encoded_gives_full_prefill(engine, corpus):
    ask = corpus.ask(0, selector="none")
    answer = engine.one(ask)
    assert answer.meta["reused_tokens"] == len(corpus.chunks[0])
    assert answer.meta["recomputed_tokens"] == 0
    assert error(answer.first, engine.full(ask)) <= TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"selector": "full"},
        *({"selector": name, "ratio": 1.0} for name in ("chunk_head", "deviation", "query", "chunk_head+query")),
        # Shares that round to every row, which are chosen by evidence and over placed KV all the same.
        *({"selector": name, "ratio": 0.999} for name in ("deviation", "query", "chunk_head+query")),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_g3_recomputing_everything_gives_full_prefill(engine, corpus, options):
    ask = corpus.ask(1, 0, 2, **options)
    answer = engine.one(ask, tokens=6)
    assert answer.meta["mode"] == "blend"
    assert answer.meta["reused_tokens"] == 123 + 150 + 91
    # The first chunk stands where it was encoded: it is recomputed only where all rows are, whatever they are.
    exact = 123 if options.get("ratio") == 0.999 else 0
    assert answer.meta["recomputed_tokens"] == answer.meta["reused_tokens"] - exact
    assert error(answer.first, engine.full(ask)) <= TOLERANCE
    assert answer.tokens == engine.one(ask.asked_plainly(), tokens=6).tokens


@pytest.mark.parametrize("seed", range(4))
def test_g4_recomputing_any_rows_of_exact_kv_changes_nothing(engine, seed):
    head, before = engine.ids(21, 300), ()
    chunks = [engine.ids(length, 301 + length) for length in (130, 41, 170)]
    for chunk in chunks:
        engine.collect([chunk], head + before)
        before += chunk
    drawn = random.Random(seed)
    rows = sorted(drawn.sample(range(21, 21 + 341), drawn.choice([1, 40, 200, 341])))
    # Encoded behind all that comes before: only the first has the prompt's own head for a prefix. So each prompt here
    # has one exact chunk, behind a head that holds the others.
    for index, chunk in enumerate(chunks):
        start = 21 + sum(map(len, chunks[:index]))
        own = [row for row in rows if start <= row < start + len(chunk)]
        ask = prompt(head + sum(chunks[:index], ()), [chunk], engine.ids(9, 2), rows=own)
        answer = engine.one(ask)
        assert answer.meta["recomputed_tokens"] == len(own)
        assert error(answer.first, engine.full(ask)) <= TOLERANCE


@pytest.mark.parametrize(
    "options", [*({"selector": name} for name in SELECTORS), GRADUAL], ids=lambda o: "-".join(map(str, o.values()))
)
def test_g5_a_blend_equals_the_reference_recomputing_the_same_rows(engine, corpus, options):
    ask = corpus.ask(3, 1, 0, 2, **options)
    answer = engine.one(ask)
    assert answer.meta["mode"] == "blend"
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_g5_a_batch_gives_what_each_gives_alone_and_so_does_asking_again(engine, corpus):
    asks = [corpus.ask(2, 0, 1, selector=name, question=engine.ids(17, 400 + i)) for i, name in enumerate(SELECTORS)]
    asks += [corpus.ask(0, 3, fresh=[1], selector="query", question=engine.ids(9, 410))]
    mixed = [*asks, *(ask.asked_plainly() for ask in asks[:3])]
    together = engine.ask(*mixed, tokens=4)
    again = engine.ask(*mixed, tokens=4)
    alone = [engine.one(ask, tokens=4) for ask in mixed]
    for ask, batched, repeated, single in zip(mixed, together, again, alone, strict=True):
        want = engine.full(ask) if ask.plain else engine.replayed(ask, batched, corpus.head)[0]
        for answer in (batched, repeated, single):
            assert error(answer.first, want) <= TOLERANCE
            assert answer.tokens == batched.tokens
            assert ask.plain or answer.meta["mode"] == "blend"
            assert ask.plain or answer.meta["recomputed_tokens"] == batched.meta["recomputed_tokens"]


def test_g6_a_blended_request_never_changes_what_an_ordinary_one_gets(engine, corpus):
    question = engine.ids(23, 500)
    ask = corpus.ask(2, 1, question=question, selector="none")
    want = engine.full(ask)
    blended = engine.one(ask)
    plain = engine.one(ask.asked_plainly())
    once_more = engine.one(ask)
    assert error(plain.first, want) <= TOLERANCE
    assert error(blended.first, want) > 1e-2
    assert error(once_more.first, blended.first) <= TOLERANCE


def test_g6_two_questions_over_the_same_chunks_each_equal_their_own_replay(engine, corpus):
    for name in SELECTORS:
        for seed in (600, 601):
            ask = corpus.ask(1, 2, 0, question=engine.ids(15, seed), selector=name)
            answer = engine.one(ask)
            assert answer.meta["mode"] == "blend"
            assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_g7_a_chunk_that_is_missing_or_damaged_is_computed_and_said_so(engine, corpus):
    unknown = engine.ids(70, 700)
    ask = prompt(corpus.head, [corpus.chunks[0], unknown, corpus.chunks[2]], corpus.question, selector="chunk_head")
    answer = engine.one(ask)
    assert answer.meta["fallback_reasons"] == [UnavailableReason.MISSING.value]
    assert answer.meta["reused_tokens"] == 150 + 91
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_g7_a_chunk_encoded_behind_another_prefix_is_not_used(engine, corpus):
    other = engine.ids(37, 710)
    ask = prompt(other, [corpus.chunks[0]], corpus.question, selector="none")
    answer = engine.one(ask)
    assert answer.meta["mode"] == "full"
    assert answer.meta["fallback_reasons"] == [UnavailableReason.PREFIX_CHANGED.value]
    assert error(answer.first, engine.full(ask)) <= TOLERANCE


def test_g8_blanked_chunks_change_the_answer(engine, corpus):
    blanks = [tuple([7] * len(corpus.chunks[i])) for i in (0, 1)]
    engine.collect(blanks, corpus.head)
    for name in ("none", "chunk_head+query", "deviation"):
        real = engine.one(corpus.ask(0, 1, selector=name))
        blank = engine.one(prompt(corpus.head, blanks, corpus.question, selector=name))
        assert blank.meta["mode"] == "blend"
        assert error(real.first, blank.first) > 1e-2


def test_the_engine_chooses_the_rows_that_the_reference_chooses(engine, corpus):
    from cacheblend.plan import BlendPlan, Segment, SegmentRole
    from cacheblend.selectors import make_selector

    for options in (
        {"name": "deviation"},
        {"name": "query"},
        {"name": "chunk_head+query"},
        {"name": "query", "ratio": 0.4},
    ):
        named = {"selector": options["name"], **({"ratio": options["ratio"]} if "ratio" in options else {})}
        ask = corpus.ask(3, 2, 1, 0, question=engine.ids(31, 800), **named)
        answer = engine.one(ask)
        engine.oracle.collect(corpus.chunks, corpus.head)
        chunks = [
            Segment(SegmentRole.CHUNK, ids, engine.identity(ids, corpus.head)) for ids, reuse in ask.parts if reuse
        ]
        segments = (
            Segment(SegmentRole.SYSTEM, corpus.head),
            *chunks,
            Segment(SegmentRole.QUESTION, ask.parts[-1][0]),
        )
        own = set(engine.oracle.score(BlendPlan(segments, make_selector(**options)))[1].rows)
        engines = set(answer.layer_rows[-1][1])
        # Rows of nearly equal scores may change places.
        assert len(own ^ engines) <= 4
        assert len(own) == len(engines)


def test_plain_requests_carry_no_account_and_asked_ones_always_do(engine, corpus):
    plain = engine.one(corpus.ask(0, 1).asked_plainly())
    assert plain.meta == {}
    full = engine.one(corpus.ask(0, 1, policy="full"))
    assert (full.meta["mode"], full.meta["fallback_reasons"]) == ("full", [])
    assert error(full.first, plain.first) <= TOLERANCE


def test_tokens_decoded_after_a_blend_follow_the_blended_kv(engine, corpus):
    ask = corpus.ask(0, 2, 1, selector="chunk_head")
    answer = engine.one(ask, tokens=24)
    assert answer.meta["mode"] == "blend"
    want = engine.replayed(ask, answer, corpus.head, forced=answer.tokens[:-1])
    assert error(answer.logprobs, want) <= TOLERANCE


def test_segments_after_the_question_are_fresh_rows_that_do_not_choose(engine, corpus):
    ask = corpus.ask(1, 0, selector="query")
    tail = engine.ids(12, 900)
    longer = Ask((*ask.parts, (tail, False)), {**ask.options, "question": len(ask.parts) - 1})
    short, long = engine.one(ask), engine.one(longer)
    assert long.meta["mode"] == "blend"
    assert long.meta["layer_rows"] == short.meta["layer_rows"]
    assert error(long.first, engine.replayed(longer, long, corpus.head)[0]) <= TOLERANCE
