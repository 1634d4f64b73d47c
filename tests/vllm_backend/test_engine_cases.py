"""What broke others: prompts and settings that go wrong elsewhere."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")

from engine_bench import Ask, error
from engine_cases import prompt
from engine_configs import TOLERANCE

from kvstore.stored_chunks import REFRESH_INTERVAL_S


def test_a_cached_chunk_right_after_a_prefix_cache_hit(engine, corpus):
    plain = corpus.ask(2, 3, question=engine.ids(11, 1)).asked_plainly()
    engine.one(plain)
    ask = corpus.ask(2, 3, question=engine.ids(11, 2), selector="chunk_head")
    answer = engine.one(ask)
    # The head's first block is exact and shared; the chunks' exact blocks must not be taken for blended ones.
    if engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
        assert answer.meta["prefix_cached_tokens"] >= 32
    assert answer.meta["reused_tokens"] == 91 + 64
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_chunks_encoded_behind_the_bos_token_alone_serve_any_head(engine):
    bos = 1
    chunks = [engine.ids(60, 11), engine.ids(75, 12)]
    engine.collect(chunks, (bos,))
    for head in ((bos, *engine.ids(20, 13)), (bos,)):
        ask = prompt(head, chunks[::-1], engine.ids(9, 14), selector="chunk_head")
        answer = engine.one(ask)
        assert answer.meta["reused_tokens"] == 135
        assert error(answer.first, engine.replayed(ask, answer, (bos,))[0]) <= TOLERANCE


def test_chunks_without_any_prefix_serve_a_prompt_without_head(engine):
    chunks = [engine.ids(50, 21), engine.ids(40, 22)]
    engine.collect(chunks)
    ask = prompt((), chunks, engine.ids(9, 23), selector="query")
    answer = engine.one(ask)
    assert answer.meta["reused_tokens"] == 90
    assert error(answer.first, engine.replayed(ask, answer)[0]) <= TOLERANCE


@pytest.mark.parametrize("selector", ["none", "query", "deviation"])
def test_chunks_encoded_behind_a_primer_are_used_before_the_place_they_were_encoded_at(engine, corpus, selector):
    primer, chunks = engine.ids(150, 61), [engine.ids(48, 62), engine.ids(33, 63)]
    engine.collect(chunks, (*corpus.head, *primer))
    ask = prompt(corpus.head, chunks, engine.ids(9, 64), selector=selector, primer=primer)
    answer = engine.one(ask)
    assert answer.meta["reused_tokens"] == 81
    assert error(answer.first, engine.replayed(ask, answer, (*corpus.head, *primer))[0]) <= TOLERANCE


@pytest.mark.parametrize(
    ("selector", "stages"),
    [
        ("chunk_head", {"load", "relocate", "recompute"}),
        ("query", {"load", "relocate", "score", "recompute"}),
        ("full", {"load", "recompute"}),
    ],
)
def test_an_account_of_several_tokens_says_how_long_each_stage_took(engine, corpus, selector, stages):
    answer = engine.one(corpus.ask(1, 0, question=engine.ids(8, 65), selector=selector), tokens=8)
    assert answer.meta["parts_ms"].keys() == stages
    assert all(milliseconds >= 0 for milliseconds in answer.meta["parts_ms"].values())
    again = engine.one(corpus.ask(0, 1, question=engine.ids(8, 66), selector=selector), tokens=8)
    assert again.meta["parts_ms"].keys() == stages


@pytest.mark.engines("llama")
@pytest.mark.parametrize(
    "options",
    [{"selector": "full"}, *({"selector": name, "ratio": 1.0} for name in ("deviation", "chunk_head+query"))],
    ids=lambda options: options["selector"],
)
def test_a_blend_that_recomputes_everything_reads_nothing_and_nor_does_its_repetition(engine, corpus, options):
    ask = corpus.ask(1, 0, 2, question=engine.ids(8, 67), **options)
    for _ in range(2):
        answer = engine.one(ask, tokens=8)
        assert (answer.meta["recomputed_tokens"], answer.meta["recomputed_ratio"]) == (150 + 123 + 91, 1.0)
        assert answer.meta["bytes_loaded"] == {}
        assert answer.meta["parts_ms"].keys() == {"load", "recompute"}
        assert error(answer.first, engine.full(ask)) <= TOLERANCE
        # The second time its rows are known, and its blocks are not there any more.
        engine.scheduler.reset_prefix_cache()


def test_the_same_chunk_twice_in_one_prompt(engine, corpus):
    ask = corpus.ask(3, 1, 3, selector="chunk_head+deviation", question=engine.ids(13, 31))
    answer = engine.one(ask)
    assert answer.meta["reused_tokens"] == 64 + 123 + 64
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


@pytest.mark.engines("llama", "llama-tiny-pool", "llama-no-prefix-caching", "llama-compiled")
def test_sixteen_requests_at_once(engine, corpus):
    names = ("chunk_head", "query", "deviation", "none")
    asks = [corpus.ask(i % 4, (i + 1) % 4, question=engine.ids(12, 40 + i), selector=names[i % 4]) for i in range(12)]
    asks += [corpus.ask(0, 3, question=engine.ids(12, 60 + i)).asked_plainly() for i in range(4)]
    for ask, answer in zip(asks, engine.ask(*asks, tokens=5), strict=True):
        assert ask.plain or answer.meta["mode"] == "blend"
        want = engine.full(ask) if ask.plain else engine.replayed(ask, answer, corpus.head)[0]
        assert error(answer.first, want) <= TOLERANCE


@pytest.mark.engines("llama-llama3", "qwen2-yarn", "qwen3-linear")
def test_a_shift_of_four_thousand_positions(engine, corpus):
    chunk = engine.ids(70, 71)
    engine.collect([chunk], corpus.head)
    head, far, question = (corpus.head, False), (engine.ids(4096, 72), False), (engine.ids(9, 73), False)
    ask = Ask((head, (chunk, True), far, (chunk, True), question), {"selector": "none"})
    answer = engine.one(ask)
    assert answer.meta["reused_tokens"] == 140
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_prompt_logprobs_together_with_a_plan_are_a_full_prefill_that_says_so(engine, corpus):
    ask = corpus.ask(0, 1, selector="none")
    asked = Ask(ask.parts, ask.options, sampling={"prompt_logprobs": 1})
    answer = engine.one(asked)
    assert (answer.meta["mode"], answer.meta["fallback_reasons"]) == ("full", ["prompt_logprobs"])
    assert error(answer.first, engine.full(ask)) <= TOLERANCE


def test_a_plan_whose_counts_are_wrong_is_a_full_prefill_that_says_so(engine, corpus):
    ask = corpus.ask(0, 1)
    wrong = Ask(ask.parts, {"segments": [{"tokens": 5}]})
    answer = engine.one(wrong)
    assert answer.meta["mode"] == "full"
    assert "5 tokens" in answer.meta["fallback_reasons"][0]
    assert answer.meta["fallback_reasons"][0].startswith("bad_plan")
    assert error(answer.first, engine.full(ask)) <= TOLERANCE


def test_a_plan_without_segments_is_a_full_prefill_without_token_ids(engine, corpus):
    ask = Ask(corpus.ask(0, 1).parts, {"segments": []})
    answer = engine.one(ask)
    assert (answer.meta["mode"], answer.meta["fallback_reasons"]) == ("full", ["no_token_ids"])


def test_auto_prefills_where_blending_would_compute_nearly_everything(engine, corpus):
    cheap = engine.one(corpus.ask(0, 1, 2, policy="auto", selector="chunk_head", question=engine.ids(9, 81)))
    dear = engine.one(corpus.ask(0, 1, 2, policy="auto", selector="query", ratio=0.95, question=engine.ids(9, 82)))
    assert cheap.meta["mode"] == "blend"
    assert dear.meta["mode"] == "full"
    assert set(dear.meta["fallback_reasons"]) == {"auto_full_cheaper"}


@pytest.mark.engines("llama", "llama-tiny-pool", "llama-no-prefix-caching")
def test_several_completions_of_one_prompt_share_its_blend(engine, corpus):
    ask = corpus.ask(1, 3, question=engine.ids(14, 91), selector="query")
    sampled = {"n": 4, "temperature": 1.0, "seed": 7, "logprobs": None}
    answer = engine.one(Ask(ask.parts, ask.options, sampling=sampled), tokens=5)
    assert len(set(answer.completions)) > 1
    again = engine.one(Ask(ask.parts, ask.options, sampling=sampled), tokens=5)
    assert again.completions == answer.completions


@pytest.mark.engines("llama", "llama-ngram")
def test_greedy_tokens_follow_the_blend_also_under_ngram_speculation(engine, corpus):
    repeating = (*engine.ids(6, 95), *engine.ids(6, 95), *engine.ids(6, 95))
    ask = corpus.ask(2, 0, question=repeating, selector="chunk_head")
    answer = engine.one(ask, tokens=30)
    assert answer.meta["mode"] == "blend"
    want = engine.replayed(ask, answer, corpus.head, forced=answer.tokens[:-1])
    assert tuple(want.argmax(-1).tolist()) == answer.tokens


@pytest.mark.engines("llama-tp2")
def test_a_store_written_under_one_rank_is_a_miss_under_two(engine, corpus):
    chunk = engine.ids(66, 99)
    engine.reference.collect([chunk], corpus.head)
    time.sleep(REFRESH_INTERVAL_S + 0.1)
    ask = prompt(corpus.head, [chunk], corpus.question, selector="none")
    answer = engine.one(ask)
    assert (answer.meta["mode"], answer.meta["fallback_reasons"]) == ("full", ["tp_layout"])


def test_a_chunk_that_another_process_collected_is_found(engine, corpus):
    if engine.name == "llama-tp2":
        pytest.skip("what one rank has written is another layout: the test above")
    chunk = engine.ids(58, 101)
    engine.reference.collect([chunk], corpus.head)
    ask = prompt(corpus.head, [chunk, corpus.chunks[0]], engine.ids(7, 102), selector="chunk_head")
    time.sleep(REFRESH_INTERVAL_S + 0.1)
    answer = engine.one(ask)
    assert answer.meta["reused_tokens"] == 58 + 150
    assert answer.meta["fallback_reasons"] == []
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE
