"""Chunks move between tiers while the engine serves: one load a chunk, budgets at run time, prediction that may die."""

from __future__ import annotations

import itertools
import os
import signal
import time
import zlib
from collections import Counter

import pytest

pytest.importorskip("vllm")

from engine_bench import error
from engine_cases import prompt
from engine_configs import TOLERANCE

from cacheblend.protocols import QuestionQueued
from kvstore.events import Published
from kvstore.tiers import Tier

pytestmark = pytest.mark.engines("llama")
RESTART_S = 60
EVERYTHING = ({"selector": "full"}, *({"selector": name, "ratio": 1.0} for name in ("query", "deviation")))


class Loads:
    """Counts how often each chunk came to host memory."""

    def __init__(self, store):
        self.count = Counter()
        self._unsubscribe = store.subscribe(self._note)

    def _note(self, event):
        if isinstance(event, Published) and event.tier is Tier.HOST:
            self.count[event.key] += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._unsubscribe()


def tell_the_scheduler(engine):
    """A step for what the worker has to tell."""
    engine.one(prompt(engine.ids(9, 1), [], engine.ids(5, 2)))


def test_a_chunk_that_64_requests_want_at_once_is_loaded_once(engine, corpus):
    engine.forget_host_copies()
    tell_the_scheduler(engine)
    asks = [corpus.ask(0, question=engine.ids(8, 7000 + number), selector="none") for number in range(64)]
    with Loads(engine.chunk_store) as loads:
        answers = engine.ask(*asks)
    # Prediction may bring others.
    assert loads.count[engine.identity(corpus.chunks[0], corpus.head).key] == 1
    assert {answer.meta["mode"] for answer in answers} == {"blend"}


def test_twenty_batches_of_permuted_chunks_load_each_chunk_once(engine, corpus):
    engine.forget_host_copies()
    tell_the_scheduler(engine)
    orders = itertools.islice(itertools.permutations(range(4)), 20)
    with Loads(engine.chunk_store) as loads:
        for number, order in enumerate(orders):
            answer = engine.one(corpus.ask(*order, question=engine.ids(8, 7100 + number), selector="chunk_head"))
            assert answer.meta["mode"] == "blend"
    assert [loads.count[engine.identity(chunk, corpus.head).key] for chunk in corpus.chunks] == [1, 1, 1, 1]


def test_a_chunk_evicted_between_look_up_and_use_is_read_through_from_disk(engine, corpus):
    ask = corpus.ask(1, 2, question=engine.ids(8, 7200), selector="chunk_head")
    engine.add(ask)
    engine.forget_host_copies()
    (answer,) = [engine.answer(output) for output in finished(engine)]
    assert answer.meta["fallback_reasons"] == []
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


@pytest.fixture
def own_chunk(engine, corpus, request):
    """A chunk of the test's own, on disk only, of which no predictor knows."""
    chunk = engine.ids(77, zlib.crc32(request.node.name.encode()) % 100_000)
    engine.collect([chunk], corpus.head)
    engine.forget_host_copies()
    tell_the_scheduler(engine)
    return chunk


@pytest.mark.parametrize("options", EVERYTHING, ids=lambda options: options["selector"])
def test_who_recomputes_everything_has_nothing_loaded_or_pinned_and_tells_of_no_chunk(
    engine, corpus, own_chunk, monkeypatch, options
):
    told = []
    monkeypatch.setattr(engine.scheduler_half._traffic, "observe", told.append)
    ask = prompt(corpus.head, [own_chunk], engine.ids(8, 7500), **options)
    with Loads(engine.chunk_store) as loads:
        engine.add(ask)
        assert engine.scheduler_half.pinned() == 0
        (answer,) = [engine.answer(output) for output in finished(engine)]
    key = engine.identity(own_chunk, corpus.head).key
    assert (loads.count[key], answer.meta["bytes_loaded"]) == (0, {})
    assert [event.chunks for event in told if isinstance(event, QuestionQueued)] == [()]
    assert error(answer.first, engine.full(ask)) <= TOLERANCE


@pytest.mark.parametrize("options", EVERYTHING, ids=lambda options: options["selector"])
def test_who_recomputes_everything_lacks_nothing_when_a_chunk_vanishes_while_it_waits(
    engine, corpus, own_chunk, options
):
    ask = prompt(corpus.head, [own_chunk, corpus.chunks[3]], engine.ids(8, 7510), **options)
    engine.add(ask)
    key = engine.identity(own_chunk, corpus.head).key
    for path in engine.store_folder.rglob(f"{key}*"):
        path.unlink()
    engine.chunk_store.recheck(key)
    assert engine.chunk_store.lookup(engine.identity(own_chunk, corpus.head)) is None
    (answer,) = [engine.answer(output) for output in finished(engine)]
    assert (answer.meta["reused_tokens"], answer.meta["fallback_reasons"]) == (77 + 64, [])
    assert error(answer.first, engine.full(ask)) <= TOLERANCE


def test_questions_share_blended_blocks_where_every_row_is_recomputed_and_not_where_they_choose(engine, corpus):
    found = {}
    for ratio in (1.0, 0.3):
        for number in range(2):
            ask = corpus.ask(2, 0, question=engine.ids(40, 7520 + number), selector="query", ratio=ratio)
            answer = engine.one(ask)
            found[ratio, number] = answer.meta["prefix_cached_tokens"]
            want = engine.full(ask) if ratio == 1.0 else engine.replayed(ask, answer, corpus.head)[0]
            assert error(answer.first, want) <= TOLERANCE
    # 278 rows before the question fill eight blocks of 32; one block of the head is everybody's.
    assert found == {(1.0, 0): 32, (1.0, 1): 256, (0.3, 0): 32, (0.3, 1): 32}


def finished(engine):
    outputs = []
    while engine.engine.has_unfinished_requests():
        outputs.extend(output for output in engine.engine.step() if output.finished)
    return outputs


def test_budgets_change_while_it_serves_and_hold(engine, corpus):
    before = engine.chunk_store.budget_bytes(Tier.HOST)
    for order in ((0, 1, 2, 3), (3, 2)):
        engine.one(corpus.ask(*order, question=engine.ids(8, 7300 + order[0]), selector="none"))
    small = engine.chunk_store.bytes_used(Tier.HOST) // 2
    assert engine.change_budgets(host=small) == {"host": small}
    assert engine.chunk_store.budget_bytes(Tier.HOST) == small
    assert 0 < engine.chunk_store.bytes_used(Tier.HOST) <= small
    ask = corpus.ask(2, 0, 1, 3, question=engine.ids(8, 7310), selector="chunk_head")
    answer = engine.one(ask)
    assert answer.meta["mode"] == "blend"
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE
    assert engine.chunk_store.bytes_used(Tier.HOST) <= small
    assert engine.change_budgets(host=before) == {"host": before}


def test_a_tier_that_there_is_not_has_no_budget_to_change(engine):
    assert engine.change_budgets(gpu=1 << 20) == {"host": engine.chunk_store.budget_bytes(Tier.HOST)}


def test_answers_are_the_same_while_the_predictor_stands_still_or_is_killed(engine, corpus):
    predictor = engine.scheduler_half._traffic._predictor
    options = {"selector": "chunk_head", "session": "s", "candidates": [list(corpus.chunks[3])]}
    asks = [corpus.ask(*order, question=engine.ids(8, 7400), **options) for order in ((0, 1), (2, 0), (1, 2))]
    wanted = [answer.tokens for answer in engine.ask(*asks, tokens=16)]
    deadline = time.monotonic() + RESTART_S
    while predictor.pid is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for blow in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(predictor.pid, blow)
        assert [answer.tokens for answer in engine.ask(*asks, tokens=16)] == wanted
    while not predictor.restarts and time.monotonic() < deadline:
        time.sleep(0.05)
    assert predictor.restarts >= 1
    assert [answer.tokens for answer in engine.ask(*asks, tokens=16)] == wanted
