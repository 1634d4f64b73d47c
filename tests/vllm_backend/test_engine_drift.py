"""Rows left alone move with the recomputed rows of their chunk, whichever way a request comes to its blend.

`engine.replayed` is the reference runner, which moves them by itself.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engine_bench import error
from engine_cases import GRADUAL, evict_tail, finish
from engine_configs import CONFIGS, TOLERANCE

SEEN_INTO = tuple(
    name for name, config in CONFIGS.items() if config.in_process and config.engine.get("enable_prefix_caching", True)
)
"""Engines in this process, with a prefix cache to take blocks from."""
SELECTING = ("chunk_head", "deviation", "query", "chunk_head+query")
OPTIONS = [*({"selector": name} for name in SELECTING), GRADUAL]


def named(options):
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_a_blend_that_carries_drift_equals_the_reference_and_not_the_one_that_does_not(engine, corpus, options):
    question = engine.ids(11, 700)
    ask = corpus.ask(3, 1, 0, 2, question=question, carry_drift=True, **options)
    without = engine.one(corpus.ask(3, 1, 0, 2, question=question, carry_drift=False, **options))
    answer = engine.one(ask)
    assert answer.meta["selector"] == f"{without.meta['selector']}+drift"
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE
    assert error(answer.first, without.first) > 10 * TOLERANCE


@pytest.mark.engines(*SEEN_INTO)
@pytest.mark.parametrize("blocks", [1, 4, 7, 10])
@pytest.mark.parametrize("options", [{"selector": "chunk_head", "head_tokens": 40}, {"selector": "query"}], ids=named)
def test_what_is_found_in_the_prefix_cache_tells_drift_as_it_did(engine, corpus, options, blocks):
    ask = corpus.ask(1, 0, 2, question=engine.ids(40, 710 + blocks), carry_drift=True, **options)
    engine.one(ask)
    engine.add(ask, tokens=1)
    evict_tail(engine, next(iter(engine.scheduler.requests.values())), blocks)
    (rest,) = finish(engine).values()
    assert rest.meta["recomputed_tokens"] > 0
    assert error(rest.first, engine.replayed(ask, rest, corpus.head)[0]) <= TOLERANCE


def test_drift_of_many_requests_at_once_is_each_ones_own(engine, corpus):
    asks = [
        corpus.ask(*order, question=engine.ids(9 + i, 750 + i), carry_drift=bool(i % 3), selector=SELECTING[i % 4])
        for i, order in enumerate([(0, 1, 2, 3), (2, 3), (1, 0, 3), (3, 2, 1), (0, 2), (1, 2, 0), (3, 0), (2, 1)])
    ]
    together = engine.ask(*asks, tokens=3)
    for ask, answer in zip(asks, together, strict=True):
        assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE
        alone = engine.one(ask, tokens=3)
        assert (alone.meta["mode"], alone.tokens) == ("blend", answer.tokens)


@pytest.mark.parametrize("selector", ["none", "full"])
def test_nothing_moves_where_nothing_or_everything_is_recomputed(engine, corpus, selector):
    question = engine.ids(8, 780)
    ask = corpus.ask(2, 0, question=question, selector=selector, carry_drift=True)
    without = engine.one(corpus.ask(2, 0, question=question, selector=selector, carry_drift=False))
    answer = engine.one(ask)
    assert error(answer.first, without.first) <= TOLERANCE
    assert answer.meta["selector"] == without.meta["selector"] == selector
