"""Primers in a pipeline: what is encoded behind them, what is found, and what fixes them."""

from __future__ import annotations

import json

import pytest

from cacheblend.reference.runner import ReferenceRunner
from kvstore.key import ChunkIdentity
from pipelines.config import PrefixMode
from pipelines.errors import PipelineError
from pipelines.primer import PRIMER_TOKENS
from pipelines.primer_source import save_primer
from retrieval.errors import RetrievalError

PLACES = ["Oss", "Velmory", "Harrow", "Pellagard", "Tarn", "Low Reach", "Quillen", "Sundry", "Aldwick", "Marsh End"]
DOCUMENTS = [
    f"The {kind} of {place} was opened in {1700 + 17 * n + m}. It has {n + 3} arches and {m + 2} keepers, and {place} "
    f"is proud of it. Every spring a fair is held beside it, where the people of {place} sell cakes and boats."
    for n, place in enumerate(PLACES)
    for m, kind in enumerate(["bridge", "mill", "lighthouse", "garden"])
]
QUESTION = "When was the mill of Harrow opened?"


@pytest.fixture(scope="module")
def primed(make_rag):
    """A pipeline over a corpus large enough for a primer, precomputed."""
    pipeline = make_rag(DOCUMENTS, primer="auto")
    pipeline.precompute()
    return pipeline


def keys(pipeline):
    return [pipeline._planner.identity(chunk).key for chunk in pipeline.chunks]


def head_of(pipeline):
    return pipeline._planner.template.head_ids


def ids_of(pipeline):
    return tuple(token for chunk in pipeline.primer for token in chunk.token_ids)


def test_the_primer_is_an_eighth_of_the_corpus_at_most_in_whole_chunks(primed):
    assert 1 < len(primed.primer) <= len(DOCUMENTS) // 8
    assert set(primed.primer) <= set(primed.chunks)
    assert len(ids_of(primed)) * 8 <= sum(len(chunk.token_ids) for chunk in primed.chunks)


def test_chunks_are_stored_behind_head_and_primer_and_those_of_the_primer_behind_the_head(primed):
    expected = {chunk.token_ids: (*head_of(primed), *ids_of(primed)) for chunk in primed.chunks}
    expected |= {chunk.token_ids: head_of(primed) for chunk in primed.primer}
    fingerprint = primed.runner.fingerprint
    stored = {ChunkIdentity(fingerprint, prefix, ids).key for ids, prefix in expected.items()}
    assert {record.key for record in primed.store.records()} == stored
    assert len(stored) == len(DOCUMENTS)


def test_every_chunk_is_reused_those_of_the_primer_too(primed):
    own = [chunk.text for chunk in primed.primer]
    others = [text for text in DOCUMENTS if text not in own][:6]
    plan = primed.prepare(QUESTION, documents=[others[0], *own, *others[1:]]).request.plan
    lengths = [len(span.segment.identity.prefix_ids) for span in plan.reused]
    head = len(head_of(primed))
    whole = head + len(ids_of(primed))
    assert lengths == [whole, *[head] * len(own), *[whole] * 5]
    # All rows by rounding: a ratio of 1.0 would read none of them.
    answer = primed.run(QUESTION, documents=[others[0], *own, *others[1:]], selector="query", ratio=0.9999)
    assert answer.meta.fallback_reasons == ()
    assert answer.text == primed.run(QUESTION, documents=[others[0], *own, *others[1:]], policy="full").text
    tokens = sum(len(span.segment.token_ids) for span in plan.reused)
    assert answer.meta.reused_tokens == tokens
    assert sum(answer.meta.bytes_loaded.values()) == tokens * primed.runner.kv_bytes_per_token


def test_a_retrieved_question_finds_every_chunk(primed):
    assert primed.run(QUESTION).meta.fallback_reasons == ()


def test_the_primed_version_is_preferred_to_the_one_behind_the_head(make_rag, tmp_path):
    make_rag(DOCUMENTS, cache_dir=tmp_path, primer=None).precompute()
    pipeline = make_rag(DOCUMENTS, cache_dir=tmp_path, primer="auto")
    summary = pipeline.precompute()
    assert (summary.cached, summary.computed) == (len(pipeline.primer), len(DOCUMENTS) - len(pipeline.primer))
    given = [text for text in DOCUMENTS if text not in [chunk.text for chunk in pipeline.primer]][:4]
    plan = pipeline.prepare(QUESTION, documents=given).request.plan
    assert {span.segment.identity.prefix_ids for span in plan.reused} == {(*head_of(pipeline), *ids_of(pipeline))}


@pytest.mark.parametrize("mode", list(PrefixMode))
def test_an_older_cache_without_primers_serves_until_it_is_computed_anew(make_rag, tmp_path, mode):
    make_rag(DOCUMENTS, cache_dir=tmp_path, primer=None, prefix=mode).precompute()
    pipeline = make_rag(DOCUMENTS, cache_dir=tmp_path, primer="auto", prefix=mode)
    assert pipeline.primer
    answer = pipeline.run(QUESTION, documents=DOCUMENTS[:5], selector="full")
    assert (answer.meta.mode, answer.meta.fallback_reasons) == ("blend", ())
    assert answer.text == pipeline.run(QUESTION, documents=DOCUMENTS[:5], policy="full").text


@pytest.mark.parametrize("settings", [{}, {"primer": None}], ids=["by default", "with None"])
def test_unless_a_primer_is_asked_for_chunks_are_encoded_behind_the_head_alone(make_rag, settings):
    pipeline = make_rag(DOCUMENTS, **settings)
    assert pipeline.primer == ()
    assert {pipeline._planner.identity(chunk).prefix_ids for chunk in pipeline.chunks} == {head_of(pipeline)}


def test_a_small_corpus_has_no_primer_and_the_keys_it_had(make_rag):
    assert keys(make_rag(DOCUMENTS[:5], primer="auto")) == keys(make_rag(DOCUMENTS[:5], primer=None))


def test_the_order_of_the_documents_does_not_change_the_primer(make_rag, primed):
    turned = make_rag(DOCUMENTS[::-1], primer="auto")
    assert [chunk.text for chunk in turned.primer] == [chunk.text for chunk in primed.primer]


def test_documents_added_or_deleted_later_do_not_change_the_primer(make_rag):
    pipeline = make_rag(DOCUMENTS[:20], primer="auto")
    pipeline.precompute()
    before, primer = keys(pipeline), pipeline.primer
    assert primer
    pipeline.add_documents(DOCUMENTS[20:])
    assert (keys(pipeline)[:20], pipeline.primer) == (before, primer)
    summary = pipeline.precompute()
    assert (summary.cached, summary.computed) == (20, len(DOCUMENTS) - 20)
    pipeline.delete_documents([primer[0].document_id])
    assert pipeline.primer == primer
    assert pipeline.run(QUESTION, documents=DOCUMENTS[18:24]).meta.fallback_reasons == ()


def test_missed_chunks_are_collected_behind_the_primer(make_rag):
    pipeline = make_rag(DOCUMENTS, primer="auto", collect_missed=True)
    asked = [pipeline.primer[0].text, *DOCUMENTS[:3]]
    assert set(pipeline.run(QUESTION, documents=asked).meta.fallback_reasons) == {"missing"}
    for _ in range(2):
        pipeline._loop.call(lambda: None)
    wanted = {pipeline._planner.identity(chunk).key for chunk in pipeline.chunks if chunk.text in asked}
    assert {record.key for record in pipeline.store.records()} == wanted


def test_a_chunk_behind_the_very_passage_that_primed_it_is_where_it_was_encoded(make_rag, tmp_path):
    """So plain reuse of both is full prefill: gate G2, with a primer."""
    file = tmp_path / "primer.txt"
    file.write_text(DOCUMENTS[0], encoding="utf-8")
    pipeline = make_rag(DOCUMENTS[:4], primer=file)
    pipeline.precompute()
    reused, full = (
        pipeline.run(QUESTION, documents=[DOCUMENTS[0], DOCUMENTS[3]], **options)
        for options in ({"selector": "none"}, {"policy": "full"})
    )
    assert (reused.meta.fallback_reasons, reused.meta.recomputed_tokens) == ((), 0)
    assert reused.text == full.text
    assert pipeline.run(QUESTION, documents=[DOCUMENTS[3]], selector="none").text != full.text


def test_a_file_pins_the_primer_for_a_corpus_that_grows(make_rag, tmp_path):
    file = tmp_path / "primer.txt"
    file.write_text(" ".join(DOCUMENTS[:3]), encoding="utf-8")
    cache = tmp_path / "kv"
    first = make_rag(DOCUMENTS[5:20], primer=file, cache_dir=cache)
    first.precompute()
    assert first.primer
    assert "".join(chunk.text for chunk in first.primer) == file.read_text(encoding="utf-8")
    grown = make_rag(DOCUMENTS[5:], primer=file, cache_dir=cache)
    summary = grown.precompute()
    assert (summary.cached, summary.computed) == (15, len(DOCUMENTS) - 20)


def test_a_saved_primer_read_again_gives_the_same_keys(make_rag, primed, tmp_path):
    texts = [{"title": f"Tales {n}", "text": f"\n  {text}\n\n\f\u2028{text} "} for n, text in enumerate(DOCUMENTS)]
    chosen = make_rag(texts, primer="auto")
    assert len(chosen.primer) > 1
    file = tmp_path / "primer.jsonl"
    save_primer(file, chosen.primer)
    pinned = make_rag([*texts, *DOCUMENTS], primer=file)
    assert ids_of(pinned) == ids_of(chosen)
    assert keys(pinned)[: len(chosen.chunks)] == keys(chosen)


def test_of_a_long_file_the_first_whole_chunks_are_taken(make_rag, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    pipeline = make_rag(DOCUMENTS[:2], primer=file)
    assert [chunk.text for chunk in pipeline.primer] == DOCUMENTS[: len(pipeline.primer)]
    used = len(ids_of(pipeline))
    assert used <= PRIMER_TOKENS < used + 128


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, PipelineError, "primer.txt is not a file; name a .txt, .md or .jsonl file, or use `auto` or none."),
        (b"", RetrievalError, "primer.txt is empty"),
        (b" \n", RetrievalError, "primer.txt is empty"),
        (b"caf\xe9", RetrievalError, "primer.txt is not UTF-8 at byte 3"),
    ],
    ids=["missing", "empty", "blank", "other encoding"],
)
def test_a_file_that_cannot_be_a_primer_is_named(make_rag, tmp_path, content, error, message):
    file = tmp_path / "primer.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=message):
        make_rag(DOCUMENTS[:2], primer=file)


def test_a_file_whose_first_chunk_is_too_long_is_refused(make_rag, tmp_path):
    file = tmp_path / "primer.txt"
    file.write_text("word " * 1500, encoding="utf-8")
    with pytest.raises(PipelineError, match=r"primer\.txt begins with a chunk of more than 1024 tokens"):
        make_rag(DOCUMENTS[:2], primer=file, chunk_tokens=1600)


def test_a_pinned_primer_that_leaves_no_room_for_a_chunk_is_refused_and_the_engine_closed(
    make_rag, tmp_path, monkeypatch
):
    closed = []
    monkeypatch.setattr(ReferenceRunner, "close", lambda runner: closed.append(runner))
    file = tmp_path / "primer.txt"
    file.write_text("word " * 600, encoding="utf-8")
    with pytest.raises(PipelineError, match=r"primer\.txt of 60\d tokens leaves no room for chunks of 1500 .* of 2048"):
        make_rag(DOCUMENTS[:2], primer=file, chunk_tokens=1500)
    assert len(closed) == 1


def test_of_a_corpus_only_so_much_is_chosen_as_leaves_room_for_a_chunk(make_rag, primed):
    longest = 2048 - len(head_of(primed)) - 100
    pipeline = make_rag(DOCUMENTS, primer="auto", chunk_tokens=longest)
    assert 0 < len(pipeline.primer) < len(primed.primer)
    assert make_rag(DOCUMENTS, primer="auto", chunk_tokens=2048).primer == ()
