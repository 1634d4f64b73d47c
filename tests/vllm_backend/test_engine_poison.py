"""No blended row is ever found under an exact hash, and nobody gets what another one's plan has made.

Each of these was a wrong answer once, without a word.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engine_bench import Ask, error
from engine_cases import evict_tail, finish, prompt
from engine_configs import TOLERANCE

from cacheblend.vllm_backend.forward import LayersForward
from kvstore.errors import ChunkUnavailable, UnavailableReason
from kvstore.store import ChunkStore

pytestmark = pytest.mark.engines("llama")


def lose(engine, monkeypatch, chunk, prefix) -> None:
    """From now on the worker cannot read this chunk, though everybody believes it is there."""
    key = engine.identity(chunk, prefix).key
    real = ChunkStore.fetch

    def fetch(self, identity, shard=None):
        if identity.key == key:
            raise ChunkUnavailable(key, UnavailableReason.MISSING, "injected")
        return real(self, identity, shard)

    monkeypatch.setattr(ChunkStore, "fetch", fetch)


@pytest.mark.parametrize("head_length", [0, 36, 33, 64])
def test_a_conversation_that_goes_on_without_a_plan_finds_no_blended_block(engine, head_length):
    head = engine.ids(head_length, 9000 + head_length)
    chunks = [engine.ids(10, 9100 + head_length), engine.ids(10, 9200 + head_length)]
    engine.collect(chunks, head)
    ask = prompt(head, chunks, engine.ids(3, 9300), selector="none")
    answer = engine.one(ask, tokens=30)
    assert answer.meta["reused_tokens"] == 20
    following = Ask(((tuple(ask.token_ids) + answer.tokens + engine.ids(9, 9400), False),), plain=True)
    assert error(engine.one(following).first, engine.full(following)) <= TOLERANCE


def test_a_blend_that_fails_over_a_partial_hit_keeps_no_row_of_the_namespace(engine, corpus, monkeypatch):
    ask = corpus.ask(1, 0, 2, question=engine.ids(40, 9500), selector="chunk_head", head_tokens=9)
    engine.one(ask)
    engine.add(ask, tokens=1)
    evict_tail(engine, next(iter(engine.scheduler.requests.values())), 9)

    def run(self, *args, **kwargs):
        raise RuntimeError("injected")

    monkeypatch.setattr(LayersForward, "run", run)
    for few in ("score_few", "recompute_alone"):
        monkeypatch.setattr(LayersForward, few, lambda *_: False)
    (answer,) = finish(engine).values()
    monkeypatch.undo()
    assert (answer.meta["mode"], answer.meta["fallback_reasons"]) == ("full", ["blend_failed: RuntimeError"])
    plain = ask.asked_plainly()
    for later in (answer, engine.one(plain), engine.one(plain)):
        assert error(later.first, engine.full(ask)) <= TOLERANCE


def test_who_waited_for_a_blend_that_lost_a_chunk_says_what_it_got(engine, corpus, monkeypatch):
    gone = engine.ids(77, 9600)
    engine.collect([gone], corpus.head)
    ask = prompt(corpus.head, [corpus.chunks[2], gone, corpus.chunks[3]], engine.ids(40, 9601), selector="chunk_head")
    lose(engine, monkeypatch, gone, corpus.head)
    for _ in range(2):
        engine.add(ask, tokens=1)
    answers = finish(engine)
    assert len(answers) == 2
    for answer in answers.values():
        assert answer.meta["fallback_reasons"] == [UnavailableReason.MISSING.value]
        assert answer.meta["reused_tokens"] == 91 + 64
        assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_a_chunk_lost_under_a_partial_hit_makes_a_full_prefill(engine, corpus, monkeypatch):
    gone = engine.ids(177, 9700)
    engine.collect([gone], corpus.head)
    ask = prompt(corpus.head, [corpus.chunks[2], gone, corpus.chunks[3]], engine.ids(40, 9701), selector="chunk_head")
    engine.one(ask)
    engine.add(ask, tokens=1)
    evict_tail(engine, next(iter(engine.scheduler.requests.values())), 7)
    lose(engine, monkeypatch, gone, corpus.head)
    (answer,) = finish(engine).values()
    assert answer.meta["mode"] == "full"
    assert error(answer.first, engine.full(ask)) <= TOLERANCE


def test_a_request_preempted_into_another_plan_chooses_that_plans_rows(engine, corpus):
    late = engine.ids(120, 9800)
    engine.collect([late], corpus.head)
    chunks = [corpus.chunks[2], late, corpus.chunks[3]]
    ask = prompt(corpus.head, chunks, engine.ids(40, 9801), selector="chunk_head", head_tokens=30)
    entries = engine.scheduler_half._traffic._scheduler._catalogue
    key = engine.identity(late, corpus.head).key
    # Unknown when the request is admitted, known again when it is preempted.
    entry = entries.pop(key)
    request = engine.add(ask, tokens=12)
    while not engine.scheduler.running:
        engine.engine.step()
    entries[key] = entry
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    # Of the first chunk none: it stands where it was encoded.
    assert finish(engine)[request].meta["recomputed_tokens"] == 60
    assert engine.one(ask).meta["recomputed_tokens"] == 60
