"""Fair to others: a large blend is spread over steps, and who decodes goes on meanwhile."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engine_bench import error
from engine_configs import CONFIGS, TOLERANCE


@pytest.mark.engines("llama-tiny-pool")
def test_decoding_goes_on_while_a_blend_larger_than_a_step_is_worked_off(engine, corpus):
    rows_per_step = CONFIGS[engine.name].settings["max_rows_per_step"]
    decoder = engine.add(corpus.ask(3, question=engine.ids(8, 1)).asked_plainly(), tokens=120)
    for _ in range(12):
        engine.engine.step()
    blend = corpus.ask(0, 1, 2, selector="full", question=engine.ids(8, 2))
    blended = engine.add(blend, tokens=1)
    tokens_before = len(generated(engine, decoder))
    answers = {}
    while blended not in answers:
        for output in engine.engine.step():
            if output.finished:
                answers[output.request_id] = engine.answer(output)
    meanwhile = len(generated(engine, decoder)) - tokens_before
    assert meanwhile >= (150 + 123 + 91) // rows_per_step
    assert error(answers[blended].first, engine.replayed(blend, answers[blended], corpus.head)[0]) <= TOLERANCE
    engine.engine.abort_request([decoder])


@pytest.mark.engines("llama-tiny-pool")
def test_blends_are_worked_off_in_the_order_they_came(engine, corpus):
    # The same chunks for all: one that waits for its chunks may be overtaken.
    rows = (100, 101, 102, 103)
    asks = [corpus.ask(0, 1, selector="chunk_head", head_tokens=count, question=engine.ids(8, count)) for count in rows]
    ids = [engine.add(ask, tokens=1) for ask in asks]
    finished = []
    while engine.engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.engine.step() if output.finished]
    assert finished == ids


def generated(engine, request_id: str) -> list[int]:
    """Ids that a running request has decoded so far: vLLM keeps it under its id and a random suffix."""
    running = [r for r in engine.scheduler.requests.values() if r.request_id.startswith(f"{request_id}-")]
    return list(running[0].output_token_ids)
