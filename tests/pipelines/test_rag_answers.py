"""`RagPipeline`: every way to ask gives the same answer, and its account is right."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from cacheblend.errors import BlendError
from cacheblend.plan import Policy
from cacheblend.sampling_params import SamplingParams
from pipelines.errors import PipelineError
from pipelines.rag import RagPipeline
from retrieval.documents import Document
from retrieval.errors import RetrievalError

DOCUMENTS = [
    Document("mill", "The mill of Harrow burned in 1841. Its owner, Ada Quill, rebuilt it in stone.", "The mill"),
    Document("ferry", "The ferry at Oss sank in 1902 with nobody on board.", "The ferry"),
    Document("tower", "Ada Quill built the tower of Brenn, which still stands by the river Tave.", "The tower"),
    Document("bridge", "A bridge replaced the ferry; it was opened by the mayor of Oss in 1910.", "The bridge"),
    Document("river", "The Tave rises in the hills above Harrow and passes Brenn on its way to the sea.", "The river"),
]
QUESTION = "When did the mill of Harrow burn?"
OTHERS = ["Who built the tower of Brenn?", "Where does the Tave rise?"]


@pytest.fixture(scope="module")
def rag(make_rag):
    """Five short documents, precomputed."""
    pipeline = make_rag(DOCUMENTS)
    pipeline.precompute()
    return pipeline


def account(answer):
    """What must not depend on the way a question is asked."""
    meta = answer.meta
    return (
        answer.question,
        answer.text,
        answer.sources,
        meta.mode,
        meta.selector,
        meta.prompt_tokens,
        meta.reused_tokens,
        meta.recomputed_tokens,
        meta.fallback_reasons,
        meta.finish_reason,
        meta.new_tokens,
    )


def test_every_way_to_ask_gives_the_same_answer(rag):
    async def asynchronously():
        pieces = [piece async for piece in rag.astream(QUESTION)]
        return await rag.arun(QUESTION), await rag.arun_batch([QUESTION, *OTHERS]), pieces

    answer = rag.run(QUESTION)
    batch = rag.run_batch([QUESTION, *OTHERS])
    stream = rag.stream(QUESTION)
    pieces = list(stream)
    from_async, async_batch, async_pieces = asyncio.run(asynchronously())
    assert answer.text
    assert account(batch[0]) == account(stream.answer) == account(from_async) == account(async_batch[0])
    assert account(batch[0]) == account(answer)
    assert "".join(pieces).strip() == "".join(async_pieces).strip() == answer.text
    assert [account(one) for one in batch[1:]] == [account(rag.run(question)) for question in OTHERS]
    assert [account(one) for one in async_batch] == [account(one) for one in batch]


def test_a_pipeline_reads_its_own_model_tokenizer_and_embedder(tiny_llm, minilm, rag):
    """Nothing shared with other tests: as a user makes one."""
    settings = {"cache_dir": None, "index_dir": None, "chunk_tokens": 128, "max_tokens": 6, "top_k": 3}
    with RagPipeline.from_documents(DOCUMENTS, model=str(tiny_llm), embedder=str(minilm), **settings) as pipeline:
        pipeline.precompute()
        assert account(pipeline.run(QUESTION)) == account(rag.run(QUESTION))


def test_a_batch_of_no_questions_is_no_answers(rag):
    assert rag.run_batch([]) == []


def test_sources_are_the_retrieved_chunks_best_first_with_their_scores(rag):
    answer = rag.run(QUESTION, top_k=2)
    assert answer.sources[0].document_id == "mill"
    assert answer.sources[0].title == "The mill"
    assert answer.sources[0].text == DOCUMENTS[0].text
    scores = [source.score for source in answer.sources]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert answer.meta.retrieval_ms > 0


def test_given_documents_are_used_in_their_order_and_nothing_is_retrieved(rag):
    before = rag.retrieval_calls
    forth = rag.run(QUESTION, documents=DOCUMENTS[:3])
    back = rag.run(QUESTION, documents=DOCUMENTS[2::-1])
    assert rag.retrieval_calls == before
    assert [source.document_id for source in forth.sources] == ["mill", "ferry", "tower"]
    assert [source.document_id for source in back.sources] == ["tower", "ferry", "mill"]
    assert {source.score for source in forth.sources} == {None}
    assert forth.meta.retrieval_ms == 0.0
    assert forth.meta.reused_tokens == back.meta.reused_tokens > 0
    assert forth.text != back.text


def test_given_documents_need_not_belong_to_the_corpus(rag):
    answer = rag.run(QUESTION, documents=["The mill of Harrow is a pub today.", DOCUMENTS[0]])
    assert answer.meta.fallback_reasons == ("missing",)
    assert answer.meta.mode == "blend"
    assert all("pub" not in chunk.text for chunk in rag.chunks)


def test_documents_shaped_like_langchains_and_llamaindexs_are_the_same_documents(rag):
    document = DOCUMENTS[0]
    metadata = {"title": document.title}
    shapes = [
        document,
        {"id": "mill", "text": document.text, "title": document.title},
        SimpleNamespace(page_content=document.text, metadata=metadata, id="mill"),
        SimpleNamespace(text=document.text, metadata=metadata, node_id="mill"),
        SimpleNamespace(get_content=lambda: document.text, metadata=metadata, id_="mill"),
        SimpleNamespace(
            node=SimpleNamespace(get_content=lambda: document.text, metadata=metadata, node_id="mill"), score=0.9
        ),
    ]
    accounts = [account(rag.run(QUESTION, documents=[shape])) for shape in shapes]
    assert accounts == [accounts[0]] * len(shapes)
    assert accounts[0][6] > 0


def test_full_prefills_and_blending_everything_gives_the_same_tokens(rag):
    full = rag.run(QUESTION, policy="full")
    blended = rag.run(QUESTION, selector="full")
    reused = rag.run(QUESTION, selector="none")
    assert (full.meta.mode, full.meta.selector, full.meta.reused_tokens) == ("full", None, 0)
    assert full.meta.bytes_loaded == {}
    assert full.meta.fallback_reasons == ()
    assert (blended.meta.mode, blended.meta.recomputed_ratio) == ("blend", 1.0)
    assert blended.text == full.text
    assert (reused.meta.selector, reused.meta.recomputed_tokens) == ("none", 0)
    assert reused.text != full.text


def test_auto_blends_where_that_is_cheaper_and_says_so_where_it_is_not(rag):
    blended = rag.run(QUESTION, policy=Policy.AUTO, selector="none")
    assert (blended.meta.mode, blended.meta.policy) == ("blend", "auto")
    full = rag.run(QUESTION, policy="auto", selector="full")
    assert (full.meta.mode, full.meta.policy) == ("full", "auto")
    assert full.meta.fallback_reason == "auto_full_cheaper"
    assert full.text == rag.run(QUESTION, policy="full").text


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, "query(ratio=0.15)+drift"),
        ({"ratio": 0.5}, "query(ratio=0.5)+drift"),
        ({"selector": "query", "carry_drift": False}, "query(ratio=0.15)"),
        ({"selector": "deviation"}, "deviation(ratio=0.15,check=1)+drift"),
        ({"selector": "chunk_head", "head_tokens": 4}, "chunk_head(4)+drift"),
        ({"selector": "chunk_head+query", "head_tokens": 2}, "chunk_head(2)+query(ratio=0.15)+drift"),
        ({"selector": "chunk_head+deviation", "ratio": 0.4, "head_tokens": 1}, None),
        ({"selector": "none"}, "none"),
    ],
)
def test_a_call_names_its_selector_and_the_account_repeats_it(rag, options, spec):
    meta = rag.run(QUESTION, **options).meta
    assert meta.mode == "blend"
    assert meta.selector == (spec or "chunk_head(1)+deviation(ratio=0.4,check=1)+drift")


def test_the_settings_selector_holds_where_a_call_names_none(make_rag):
    pipeline = make_rag(DOCUMENTS, selector="query", ratio=0.4)
    pipeline.precompute()
    assert pipeline.run(QUESTION, documents=DOCUMENTS[:1]).meta.selector == "query(ratio=0.4)+drift"
    assert pipeline.run(QUESTION, documents=DOCUMENTS[:1], selector="deviation").meta.selector == (
        "deviation(ratio=0.15,check=1)+drift"
    )


def test_the_numbers_of_an_account_agree_with_one_another(rag):
    prepared = rag.prepare(QUESTION, selector="query", ratio=0.25)
    meta = rag.run(QUESTION, selector="query", ratio=0.25).meta
    fresh = sum(len(segment.token_ids) for segment in prepared.request.plan.segments if not segment.reused)
    assert meta.reused_tokens + fresh == meta.prompt_tokens == prepared.request.plan.length
    assert meta.recomputed_tokens == round(0.25 * meta.reused_tokens)
    assert meta.recomputed_ratio == pytest.approx(meta.recomputed_tokens / meta.reused_tokens)
    assert sum(meta.bytes_loaded.values()) == meta.reused_tokens * rag.runner.kv_bytes_per_token
    assert set(meta.parts_ms) == {"load", "score", "relocate", "recompute", "question"}
    assert meta.ttft_ms >= meta.queue_ms >= 0
    assert meta.tpot_ms > 0
    assert (meta.new_tokens, meta.finish_reason) == (6, "length")
    assert (meta.engine, meta.policy, meta.fallback_reason) == ("reference", "blend", None)


def test_an_answer_can_be_written_as_json(rag):
    written = json.loads(json.dumps(rag.run(QUESTION).to_dict()))
    assert written["sources"][0]["document_id"] == "mill"
    assert written["meta"]["mode"] == "blend"


def test_bytes_come_from_disk_on_a_cold_run_and_from_the_host_on_a_warm_one(make_rag, tmp_path):
    make_rag(DOCUMENTS, cache_dir=tmp_path).precompute()
    restarted = make_rag(DOCUMENTS, cache_dir=tmp_path)
    cold, warm = (restarted.run(QUESTION, documents=DOCUMENTS[:2]) for _ in range(2))
    nbytes = cold.meta.reused_tokens * restarted.runner.kv_bytes_per_token
    assert cold.meta.bytes_loaded == {"disk": nbytes}
    assert warm.meta.bytes_loaded == {"host": nbytes}
    assert account(cold) == account(warm)


@pytest.mark.parametrize("budget", [0, 1, 20_000])
def test_a_host_smaller_than_the_prompt_changes_where_bytes_come_from_and_no_token(make_rag, rag, tmp_path, budget):
    small = make_rag(DOCUMENTS, cache_dir=tmp_path, host_budget_bytes=budget)
    small.precompute()
    answer = small.run(QUESTION, documents=DOCUMENTS)
    assert account(answer) == account(rag.run(QUESTION, documents=DOCUMENTS))
    assert answer.meta.bytes_loaded["disk"] > 0
    assert small.store.host_bytes_used <= budget


def test_missing_chunks_are_fresh_and_reported_and_the_rest_is_blended(make_rag):
    pipeline = make_rag(DOCUMENTS[:2])
    nothing = pipeline.run(QUESTION, documents=DOCUMENTS[:2])
    assert (nothing.meta.mode, nothing.meta.fallback_reasons) == ("full", ("missing", "missing"))
    assert nothing.meta.fallback_reason == "missing"
    wait_for_background_work(pipeline)
    assert pipeline.store.records() == []
    pipeline.precompute()
    some = pipeline.run(QUESTION, documents=DOCUMENTS[:3], selector="full")
    assert (some.meta.mode, some.meta.fallback_reasons) == ("blend", ("missing",))
    assert some.text == pipeline.run(QUESTION, documents=DOCUMENTS[:3], policy="full").text


def wait_for_background_work(pipeline):
    """The thread that gave the answer posts the work right after; the second message comes behind it for sure."""
    for _ in range(2):
        pipeline._loop.call(lambda: None)


def test_missed_chunks_are_collected_after_the_answer_only_where_asked_for(make_rag):
    pipeline = make_rag(collect_missed=True)
    first = pipeline.run(QUESTION, documents=DOCUMENTS[:2])
    assert first.meta.fallback_reasons == ("missing", "missing")
    wait_for_background_work(pipeline)
    second = pipeline.run(QUESTION, documents=DOCUMENTS[:2])
    assert second.meta.fallback_reasons == ()
    assert second.meta.reused_tokens > 0


def test_a_collection_that_fails_spoils_no_question(make_rag, monkeypatch):
    pipeline = make_rag(collect_missed=True)

    def broken(*_):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(pipeline.runner, "collect", broken)
    for _ in range(3):
        assert pipeline.run(QUESTION, documents=DOCUMENTS[:1]).text
        wait_for_background_work(pipeline)
    assert pipeline.store.records() == []


ODD_TEXTS = [
    "Emoji \N{GRINNING FACE}\N{FAMILY}\N{ZERO WIDTH JOINER}\N{GIRL} and flags \U0001f1e9\U0001f1ea.",
    "النص العربي يُكتب من اليمين إلى اليسار.",
    "A NUL \x00 in the middle.",
    "x",
    " .",
]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_are_answered_from_and_reused_like_any_other(make_rag, rag, text):
    before = rag.run(QUESTION, documents=[text], policy="full")
    rag._collect([rag._planner.identity(chunk) for chunk in rag._corpus.chunk(Document.from_any(text))])
    after = rag.run(QUESTION, documents=[text], selector="full")
    assert after.meta.mode == "blend"
    assert after.text == before.text
    assert after.sources[0].text == text


def test_the_same_chunk_twice_and_nothing_but_one_chunk_are_prompts_like_any_other(rag):
    for documents in ([DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[0]], [DOCUMENTS[0]] * 4):
        blended = rag.run(QUESTION, documents=documents, selector="full")
        assert blended.text == rag.run(QUESTION, documents=documents, policy="full").text
        assert len(blended.sources) == len(documents)
        once = rag.run(QUESTION, documents=documents[:1]).meta.reused_tokens
        assert blended.meta.reused_tokens > 2 * once - 1


def test_a_seed_makes_a_sampled_answer_repeatable(rag):
    def ask(seed):
        return rag.run(QUESTION, sampling=SamplingParams(max_tokens=6, temperature=1.0, seed=seed)).text

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


LONG = "word " * 3000


@pytest.mark.parametrize(
    ("question", "options", "error", "words"),
    [
        ("", {}, PipelineError, "question is empty"),
        (" \n", {}, PipelineError, "question is empty"),
        (LONG, {}, BlendError, "do not fit the model's context of 2048"),
        (QUESTION, {"documents": [LONG]}, BlendError, "do not fit the model's context of 2048"),
        (QUESTION, {"sampling": SamplingParams(max_tokens=2048)}, BlendError, "do not fit"),
        (QUESTION, {"policy": "fast"}, PipelineError, "'fast' is unknown; use one of full, blend, auto"),
        (QUESTION, {"selector": "nearest"}, BlendError, "'nearest' is unknown"),
        (QUESTION, {"ratio": 1.5}, BlendError, "1.5"),
        (QUESTION, {"selector": "none", "ratio": 0.5}, BlendError, "takes no ratio"),
        (QUESTION, {"head_tokens": -1}, BlendError, "-1"),
        (QUESTION, {"top_k": 0}, RetrievalError, "0 chunks"),
        (QUESTION, {"documents": []}, PipelineError, "list of documents is empty"),
        (QUESTION, {"documents": "The mill burned."}, PipelineError, "a single str; give a list"),
        (QUESTION, {"documents": {"text": "The mill burned."}}, PipelineError, "a single dict; give a list"),
        (QUESTION, {"documents": [""]}, RetrievalError, "no text"),
        (QUESTION, {"documents": [7]}, RetrievalError, "int is no document"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_sentence_and_the_next_question_is_answered(
    rag, question, options, error, words
):
    for ask in (rag.run, rag.stream, lambda q, **o: rag.run_batch([QUESTION, q], **o)):
        with pytest.raises(error, match=words) as caught:
            ask(question, **options)
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith(".")
    assert rag.run(QUESTION).text


def test_an_empty_corpus_answers_from_given_documents_only(make_rag):
    pipeline = make_rag()
    with pytest.raises(RetrievalError, match="empty"):
        pipeline.run(QUESTION)
    assert pipeline.run(QUESTION, documents=DOCUMENTS[:1]).text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_k": 0}, "'top_k' cannot be 0"),
        ({"colour": "red"}, "'colour'"),
        ({"ratio": 2.0}, "ratio is 2.0"),
        ({"selector": "nearest"}, "'nearest' is unknown"),
        ({"prefix": "tail"}, "'prefix' cannot be 'tail'"),
        ({"engine": "other"}, "'engine' cannot be 'other'"),
        ({"policy": "fast"}, "'policy' cannot be 'fast'"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_loaded(make_rag, settings, words):
    with pytest.raises(PipelineError, match=words):
        make_rag(**settings)


def test_an_engine_that_is_not_there_is_named(make_rag):
    with pytest.raises(PipelineError, match=r"'vllm' (is not installed|cannot serve this model)"):
        make_rag(engine="vllm")


def test_a_cache_folder_that_is_a_file_is_refused(make_rag, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(ValueError, match="is, or lies below, a file"):
        make_rag(cache_dir=file)
    assert file.read_text() == "not a folder"
