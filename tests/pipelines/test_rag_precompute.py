"""`RagPipeline.precompute`: what it computes, what it finds, and what it survives."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvstore.errors import UnavailableReason
from kvstore.tiers import Tier
from pipelines.precompute import CHUNKS_PER_CALL, PrecomputeProgress

DOCUMENTS = [f"Lighthouse {number} stands on a rock and was lit in {1800 + number}." for number in range(10)]
QUESTION = "When was lighthouse 3 lit?"


def collected(pipeline, monkeypatch):
    """The chunks that the runner is asked to compute from now on."""
    seen: list[tuple[int, ...]] = []
    collect = pipeline.runner.collect

    def noting(chunks, prefix):
        seen.extend(map(tuple, chunks))
        return collect(chunks, prefix)

    monkeypatch.setattr(pipeline.runner, "collect", noting)
    return seen


def test_it_never_calls_the_retriever_nor_loads_the_embedder(make_rag, monkeypatch):
    pipeline = make_rag(DOCUMENTS)
    monkeypatch.setattr(pipeline._corpus, "_load_embedder", lambda: pytest.fail("the embedder was loaded"))
    pipeline.precompute(dry_run=True)
    pipeline.precompute()
    assert pipeline.retrieval_calls == 0
    monkeypatch.undo()
    pipeline.run(QUESTION)
    assert pipeline.retrieval_calls == 1


def test_a_dry_run_computes_nothing_and_foretells_the_real_one(make_rag, monkeypatch, tmp_path):
    pipeline = make_rag(DOCUMENTS, cache_dir=tmp_path)
    seen = collected(pipeline, monkeypatch)
    dry = pipeline.precompute(dry_run=True)
    assert seen == []
    assert pipeline.store.records() == []
    assert list(tmp_path.rglob("*.safetensors")) == []
    wet = pipeline.precompute()
    assert dry.dry_run
    assert not wet.dry_run
    for name in ("chunks", "distinct", "cached", "computed", "tokens", "tokens_computed", "kv_bytes"):
        assert getattr(dry, name) == getattr(wet, name)


def test_the_summary_counts_chunks_tokens_and_bytes(make_rag, tmp_path):
    pipeline = make_rag([*DOCUMENTS, DOCUMENTS[0], {"id": "again", "text": DOCUMENTS[1]}], cache_dir=tmp_path)
    summary = pipeline.precompute()
    tokens = sum(len(chunk.token_ids) for chunk in pipeline.chunks if chunk.document_id != "again")
    assert (summary.chunks, summary.distinct, summary.cached, summary.computed) == (11, 10, 0, 10)
    assert summary.tokens == summary.tokens_computed == tokens
    assert summary.bytes_per_token == pipeline.runner.kv_bytes_per_token
    assert summary.kv_bytes == sum(record.nbytes for record in pipeline.store.records())
    assert len(list(tmp_path.rglob("*.safetensors"))) == 10
    assert summary.not_on_disk == {}
    assert summary.seconds > 0
    assert summary.to_dict()["computed"] == 10


def test_a_second_run_finds_everything_also_after_a_restart(make_rag, monkeypatch, tmp_path):
    make_rag(DOCUMENTS, cache_dir=tmp_path).precompute()
    restarted = make_rag(DOCUMENTS, cache_dir=tmp_path)
    seen = collected(restarted, monkeypatch)
    summary = restarted.precompute()
    assert (summary.cached, summary.computed, summary.tokens_computed) == (10, 0, 0)
    assert seen == []
    assert restarted.run(QUESTION).meta.fallback_reasons == ()


def test_only_what_is_missing_is_computed(make_rag, monkeypatch):
    pipeline = make_rag(DOCUMENTS[:4])
    pipeline.precompute()
    pipeline.add_documents(DOCUMENTS[4:])
    seen = collected(pipeline, monkeypatch)
    summary = pipeline.precompute()
    assert (summary.cached, summary.computed) == (4, 6)
    assert seen == [chunk.token_ids for chunk in pipeline.chunks[4:]]


def test_progress_starts_at_what_is_cached_and_ends_at_everything(make_rag):
    pipeline = make_rag(DOCUMENTS[:2])
    pipeline.precompute()
    pipeline.add_documents(DOCUMENTS[2:])
    seen: list[PrecomputeProgress] = []
    summary = pipeline.precompute(seen.append)
    assert [progress.chunks_done for progress in seen] == [2, 2 + CHUNKS_PER_CALL, 10]
    assert seen[0].tokens_done == summary.tokens - summary.tokens_computed
    assert seen[0].kv_bytes == 0
    assert (seen[-1].tokens_done, seen[-1].tokens) == (summary.tokens, summary.tokens)
    assert seen[-1].kv_bytes == summary.kv_bytes


def test_an_interrupted_run_keeps_what_it_had_and_the_next_one_goes_on(make_rag, monkeypatch, tmp_path):
    pipeline = make_rag(DOCUMENTS, cache_dir=tmp_path)

    def interrupt(progress):
        if progress.chunks_done >= CHUNKS_PER_CALL:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.precompute(interrupt)
    restarted = make_rag(DOCUMENTS, cache_dir=tmp_path)
    seen = collected(restarted, monkeypatch)
    summary = restarted.precompute()
    assert (summary.cached, summary.computed) == (CHUNKS_PER_CALL, len(DOCUMENTS) - CHUNKS_PER_CALL)
    assert len(seen) == summary.computed


def test_an_event_loop_gets_the_same_summary(make_rag):
    seen = []
    summary = asyncio.run(make_rag(DOCUMENTS).aprecompute(seen.append))
    assert (summary.computed, summary.cached) == (len(DOCUMENTS), 0)
    assert [progress.chunks_done for progress in seen] == [0, 4, 8, 10]


def test_cancelling_it_in_an_event_loop_keeps_what_was_begun_and_computes_no_more(make_rag):
    pipeline = make_rag(DOCUMENTS)
    begun, go_on = threading.Event(), threading.Event()

    async def cancel():
        computing = asyncio.create_task(pipeline.aprecompute(lambda _: (begun.set(), go_on.wait(30))))
        await asyncio.to_thread(begun.wait, 30)
        computing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await computing
        go_on.set()

    asyncio.run(cancel())
    assert len(pipeline.store.records()) == CHUNKS_PER_CALL


def test_questions_are_answered_while_chunks_are_computed(make_rag):
    pipeline = make_rag(DOCUMENTS)
    answers = []
    pipeline.precompute(lambda progress: answers.append(pipeline.run(QUESTION, documents=DOCUMENTS[:2])))
    assert [answer.meta.mode for answer in answers] == ["full", *["blend"] * (len(answers) - 1)]
    assert len(answers) > 2


def test_a_cache_folder_that_cannot_be_written_is_reported_and_questions_are_still_answered(make_rag):
    """Nobody, root included, creates folders in /proc."""
    pipeline = make_rag(DOCUMENTS, cache_dir="/proc/cacheblend-cache")
    summary = pipeline.precompute()
    assert summary.not_on_disk == {UnavailableReason.UNWRITABLE.value: 10}
    answer = pipeline.run(QUESTION)
    assert answer.meta.bytes_loaded.keys() == {"host"}
    assert answer.meta.fallback_reasons == ()


def test_neither_folder_nor_room_on_the_host_means_full_prefill_and_says_so(make_rag):
    pipeline = make_rag(DOCUMENTS, cache_dir="/proc/cacheblend-cache", host_budget_bytes=0)
    pipeline.precompute()
    meta = pipeline.run(QUESTION).meta
    assert (meta.mode, meta.fallback_reason) == ("full", "missing")


def test_a_pipeline_without_a_folder_keeps_chunks_in_memory(make_rag):
    pipeline = make_rag(DOCUMENTS, cache_dir=None)
    assert pipeline.precompute().computed == 10
    assert {tier for record in pipeline.store.records() for tier in record.tiers} == {Tier.HOST}
    assert pipeline.run(QUESTION).meta.mode == "blend"


def test_a_damaged_file_is_prefilled_with_its_reason_and_computed_again_by_the_next_precompute(make_rag, tmp_path):
    make_rag(DOCUMENTS[:2], cache_dir=tmp_path).precompute()
    pipeline = make_rag(DOCUMENTS[:2], cache_dir=tmp_path)
    path = next(tmp_path.rglob(f"{pipeline._planner.identity(pipeline.chunks[0]).key}*.safetensors"))
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    # All rows by rounding: a ratio of 1.0 would not read the file at all.
    everything = {"selector": "query", "ratio": 0.9999}
    first = pipeline.run(QUESTION, documents=DOCUMENTS[:2], **everything)
    assert (first.meta.mode, first.meta.fallback_reasons) == ("blend", ("checksum",))
    again = pipeline.run(QUESTION, documents=DOCUMENTS[:2], **everything)
    assert again.meta.fallback_reasons == ("checksum",)
    assert again.text == first.text == pipeline.run(QUESTION, documents=DOCUMENTS[:2], policy="full").text
    assert pipeline.precompute().computed == 1
    assert pipeline.run(QUESTION, documents=DOCUMENTS[:2]).meta.fallback_reasons == ()


def test_chunks_that_no_tier_has_room_for_are_counted_as_kept_nowhere(make_rag):
    pipeline = make_rag(["A mill stood here.", "A ferry left there."], cache_dir=None, host_budget_bytes=0)
    summary = pipeline.precompute()
    assert summary.computed == summary.not_kept == 2
