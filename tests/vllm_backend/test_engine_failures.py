"""Failure is ordinary: a chunk becomes fresh rows, others do not notice, nothing is held, the engine lives."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engine_bench import error
from engine_cases import prompt
from engine_configs import TOLERANCE

from cacheblend.vllm_backend.forward import LayersForward
from kvstore.errors import ChunkUnavailable, UnavailableReason
from kvstore.store import ChunkStore

pytestmark = pytest.mark.engines("llama-tiny-pool", "llama")


@pytest.fixture(autouse=True)
def nothing_is_held(engine):
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    yield
    while engine.engine.has_unfinished_requests():
        engine.engine.step()
    half = engine.scheduler_half
    assert half.pinned() == 0
    assert half._tracked == {}
    assert len(half._collecting) == 0
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def finish(engine, *request_ids):
    """Step until these requests are done; their answers."""
    answers = {}
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            if output.finished:
                answers[output.request_id] = engine.answer(output)
    return [answers[request_id] for request_id in request_ids]


def files_of(engine, chunk, prefix):
    key = engine.identity(chunk, prefix).key
    return [path for path in engine.store_folder.rglob("*") if path.name.startswith(key)]


@pytest.fixture
def own_chunk(engine, corpus, request):
    """A chunk of the test's own, on disk only: its host copy, if it has one, is let go of."""
    chunk = engine.ids(77, hash(request.node.name) % 100_000)
    engine.collect([chunk], corpus.head)
    return chunk


def test_a_chunk_deleted_between_plan_and_use_is_computed(engine, corpus, own_chunk):
    engine.forget_host_copies()
    ask = prompt(corpus.head, [own_chunk, corpus.chunks[3]], corpus.question, selector="chunk_head")
    request = engine.add(ask)
    for path in files_of(engine, own_chunk, corpus.head):
        path.unlink()
    (answer,) = finish(engine, request)
    assert answer.meta["reused_tokens"] == 64
    assert set(answer.meta["fallback_reasons"]) <= {"missing", "evicted"}
    assert len(answer.meta["fallback_reasons"]) == 1
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_a_file_that_is_damaged_while_a_request_waits_is_not_used(engine, corpus, own_chunk):
    engine.forget_host_copies()
    ask = prompt(corpus.head, [own_chunk, corpus.chunks[3]], corpus.question, selector="query")
    request = engine.add(ask)
    (path,) = files_of(engine, own_chunk, corpus.head)
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 255
    path.write_bytes(bytes(damaged))
    (answer,) = finish(engine, request)
    assert answer.meta["fallback_reasons"] == [UnavailableReason.CHECKSUM.value]
    assert answer.meta["reused_tokens"] == 64
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_a_request_whose_only_chunk_cannot_be_loaded_is_a_full_prefill(engine, corpus, own_chunk):
    engine.forget_host_copies()
    ask = prompt(corpus.head, [own_chunk], corpus.question, selector="none")
    request = engine.add(ask)
    (path,) = files_of(engine, own_chunk, corpus.head)
    path.write_bytes(path.read_bytes()[:500])
    (answer,) = finish(engine, request)
    assert answer.meta["mode"] == "full"
    assert answer.meta["fallback_reasons"] == [UnavailableReason.TRUNCATED.value]
    assert error(answer.first, engine.full(ask)) <= TOLERANCE


def test_what_a_failed_load_computed_serves_nobody_else(engine, corpus, own_chunk):
    """After the chunk is there again, the same prompt is blended with it, not found as it was without."""
    ask = prompt(corpus.head, [corpus.chunks[3], own_chunk], engine.ids(8, 5), selector="chunk_head")
    engine.forget_host_copies()
    request = engine.add(ask)
    for path in files_of(engine, own_chunk, corpus.head):
        path.unlink()
    (without,) = finish(engine, request)
    engine.collect([own_chunk], corpus.head)
    answer = engine.one(ask)
    assert without.meta["reused_tokens"] == 64
    assert answer.meta["reused_tokens"] == 64 + 77
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


def test_a_blend_that_raises_is_a_full_prefill_and_others_do_not_notice(engine, corpus, own_chunk, monkeypatch):
    real = LayersForward.run
    victim = prompt(corpus.head, [own_chunk, corpus.chunks[0]], engine.ids(10, 201), selector="chunk_head")
    others = [corpus.ask(1, 2, selector="query", question=engine.ids(10, 202)), corpus.ask(3, 2).asked_plainly()]
    broken = victim.token_ids[37:80]

    def run(self, first, last, hidden, rows, *args, **kwargs):
        for part in rows.parts:
            if part.prompt.token_ids[37:80].tolist() == broken:
                raise RuntimeError("injected")
        return real(self, first, last, hidden, rows, *args, **kwargs)

    monkeypatch.setattr(LayersForward, "run", run)
    for few in ("score_few", "recompute_alone"):
        monkeypatch.setattr(LayersForward, few, lambda *_: False)
    first, *rest = engine.ask(victim, *others, tokens=3)
    assert first.meta["mode"] == "full"
    assert first.meta["fallback_reasons"] == ["blend_failed: RuntimeError"]
    assert error(first.first, engine.full(victim)) <= TOLERANCE
    assert error(rest[0].first, engine.replayed(others[0], rest[0], corpus.head)[0]) <= TOLERANCE
    assert error(rest[1].first, engine.full(others[1])) <= TOLERANCE
    monkeypatch.undo()
    healed = engine.one(victim)
    assert healed.meta["mode"] == "blend"
    assert error(healed.first, engine.replayed(victim, healed, corpus.head)[0]) <= TOLERANCE


def test_a_full_store_is_reported_and_nothing_breaks(engine, corpus, monkeypatch):
    def full(self, chunk):
        raise ChunkUnavailable(chunk.identity.key, UnavailableReason.DISK_FULL, "injected")

    monkeypatch.setattr("kvstore.disk.DiskTier.put", full)
    chunk = engine.ids(88, 211)
    (account,) = engine.collect([chunk], corpus.head)
    assert account["on_disk"] is False
    assert account["reason"] == UnavailableReason.DISK_FULL.value
    monkeypatch.undo()
    ask = prompt(corpus.head, [chunk, corpus.chunks[3]], corpus.question, selector="chunk_head")
    answer = engine.one(ask)
    assert answer.meta["reused_tokens"] == (64 + 88 if account["on_host"] else 64)


def test_a_store_that_raises_does_not_fail_the_request_that_collects(engine, corpus, monkeypatch):
    monkeypatch.setattr(ChunkStore, "put", lambda self, chunk: (_ for _ in ()).throw(OSError("injected")))
    (account,) = engine.collect([engine.ids(88, 212)], corpus.head)
    assert (account["on_disk"], account["on_host"]) == (False, False)


@pytest.mark.parametrize("steps", range(5))
def test_aborting_at_any_time_lets_go_of_everything(engine, corpus, steps):
    engine.forget_host_copies()
    doomed = [
        corpus.ask(0, 1, 2, selector=name, question=engine.ids(10, 300 + i))
        for i, name in enumerate(("chunk_head", "query", "deviation"))
    ]
    kept = corpus.ask(3, 1, selector="query", question=engine.ids(10, 310))
    ids = [engine.add(ask) for ask in doomed]
    staying = engine.add(kept)
    early = {}
    for _ in range(steps):
        for output in engine.engine.step():
            if output.finished:
                early[output.request_id] = engine.answer(output)
    engine.engine.abort_request(ids)
    (answer,) = [early[staying]] if staying in early else finish(engine, staying)
    assert error(answer.first, engine.replayed(kept, answer, corpus.head)[0]) <= TOLERANCE


def test_an_aborted_leader_leaves_its_followers_to_blend_themselves(engine, corpus):
    ask = corpus.ask(2, 3, 0, selector="query", question=engine.ids(10, 320))
    leader, follower = engine.add(ask), engine.add(ask)
    engine.engine.step()
    engine.engine.abort_request([leader])
    (answer,) = finish(engine, follower)
    assert answer.meta["mode"] == "blend"
    assert error(answer.first, engine.replayed(ask, answer, corpus.head)[0]) <= TOLERANCE


@pytest.mark.engines("llama-tiny-pool")
def test_preempted_requests_go_on_with_the_rows_they_had(engine, corpus):
    names = ("query", "deviation", "chunk_head", "chunk_head+query", "none", "query")
    asks = [
        corpus.ask(i % 4, (i + 1) % 4, question=engine.ids(10, 330 + i), selector=name) for i, name in enumerate(names)
    ]
    preempted = []
    original = engine.scheduler._preempt_request

    def note(request, *args, **kwargs):
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    engine.scheduler._preempt_request = note
    try:
        answers = engine.ask(*asks, tokens=70)
    finally:
        del engine.scheduler._preempt_request
    assert preempted
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.meta["mode"] == "blend"
        want = engine.replayed(ask, answer, corpus.head, forced=answer.tokens[:-1])
        assert error(answer.logprobs, want) <= TOLERANCE
