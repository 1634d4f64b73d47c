"""What chunks are encoded behind, and what is found when that changes."""

from __future__ import annotations

import pytest

from pipelines.config import PrefixMode

DOCUMENTS = ["The ferry at Oss sank in 1902.", "A bridge replaced it eight years later."]
QUESTION = "What replaced the ferry?"


def identities(pipeline):
    return [pipeline._planner.identity(chunk) for chunk in pipeline.chunks]


def ask(pipeline, **options):
    return pipeline.run(QUESTION, documents=DOCUMENTS, **options)


@pytest.mark.parametrize("mode", list(PrefixMode))
def test_chunks_are_encoded_behind_what_the_mode_names_and_reused(make_rag, mode):
    pipeline = make_rag(DOCUMENTS, prefix=mode)
    head = pipeline._planner.template.head_ids
    expected = {"system": head, "bos": (pipeline._tokenizer.bos_token_id,), "none": ()}[mode.value]
    pipeline.precompute()
    assert {identity.prefix_ids for identity in identities(pipeline)} == {expected}
    answer = ask(pipeline, selector="full")
    assert answer.meta.fallback_reasons == ()
    assert answer.text == ask(pipeline, policy="full").text


def test_the_first_chunk_behind_the_system_prompt_is_where_it_was_encoded(make_rag):
    """So plain reuse of one chunk behind the same prefix is full prefill: gate G2, through the whole pipeline."""
    pipeline = make_rag(DOCUMENTS, prefix="system")
    pipeline.precompute()
    reused, full = (
        pipeline.run(QUESTION, documents=DOCUMENTS[:1], **options)
        for options in ({"selector": "none"}, {"policy": "full"})
    )
    assert (reused.meta.mode, reused.meta.recomputed_tokens) == ("blend", 0)
    assert reused.text == full.text


def test_another_system_prompt_makes_chunks_fresh_with_the_reason_prefix_changed(make_rag, tmp_path):
    make_rag(DOCUMENTS, cache_dir=tmp_path).precompute()
    other = make_rag(DOCUMENTS, cache_dir=tmp_path, system_prompt="Answer in one word.")
    answer = ask(other)
    assert (answer.meta.mode, answer.meta.fallback_reason) == ("full", "prefix_changed")
    assert answer.meta.fallback_reasons == ("prefix_changed", "prefix_changed")
    assert other.precompute().computed == 2
    assert ask(other).meta.fallback_reasons == ()


@pytest.mark.parametrize("mode", ["system", "none"])
def test_an_entry_behind_the_beginning_token_alone_serves_every_prefix(make_rag, tmp_path, mode):
    make_rag(DOCUMENTS, cache_dir=tmp_path, prefix="bos").precompute()
    other = make_rag(DOCUMENTS, cache_dir=tmp_path, prefix=mode)
    answer = ask(other, selector="full")
    assert (answer.meta.mode, answer.meta.fallback_reasons) == ("blend", ())
    assert answer.text == ask(other, policy="full").text


def test_the_own_prefix_is_preferred_to_the_beginning_token(make_rag, tmp_path):
    make_rag(DOCUMENTS, cache_dir=tmp_path, prefix="bos").precompute()
    pipeline = make_rag(DOCUMENTS, cache_dir=tmp_path, prefix="system")
    assert pipeline.precompute().computed == 2
    plan = pipeline.prepare(QUESTION, documents=DOCUMENTS).request.plan
    assert {span.segment.identity.prefix_ids for span in plan.reused} == {pipeline._planner.template.head_ids}


def test_an_entry_without_prefix_does_not_serve_another_prefix(make_rag, tmp_path):
    make_rag(DOCUMENTS, cache_dir=tmp_path, prefix="none").precompute()
    assert ask(make_rag(DOCUMENTS, cache_dir=tmp_path, prefix="system")).meta.fallback_reason == "prefix_changed"


def test_the_chunks_of_another_model_are_not_served(make_rag, tmp_path, make_tiny_model, tiny_llm):
    import shutil

    make_rag(DOCUMENTS, cache_dir=tmp_path / "kv").precompute()
    shutil.copytree(tiny_llm, tmp_path / "other")
    make_tiny_model("llama-default", seed=9, vocab_size=49152, max_position_embeddings=2048).save_pretrained(
        tmp_path / "other"
    )
    other = make_rag(DOCUMENTS, cache_dir=tmp_path / "kv", model=str(tmp_path / "other"))
    answer = ask(other)
    assert (answer.meta.mode, answer.meta.fallback_reason) == ("full", "other_model")
