"""G6: a blended request never changes what an ordinary request gets."""

from cacheblend.plan import full_prefill_plan
from cacheblend.selectors import make_selector


def test_g6_an_ordinary_request_for_the_same_text_is_untouched_by_blended_ones(bench):
    chunks = [bench.collect(bench.ids(n, n)) for n in (80, 50)]
    system, question = bench.ids(10, 1), bench.ids(8, 2)
    blended = bench.plan(chunks, question, make_selector("none"), system)
    ordinary = full_prefill_plan(blended.token_ids)
    want = bench.oracle_tokens(blended.token_ids)
    assert bench.tokens([ordinary]) == [want]
    blended_tokens = bench.tokens([blended])[0]
    assert bench.tokens([ordinary, blended, ordinary]) == [want, blended_tokens, want]
    assert blended_tokens != want


def test_g6_stored_chunks_are_not_changed_by_the_requests_that_use_them(bench):
    chunk = bench.collect(bench.ids(70, 3))
    before = bench.store.get(chunk).kv.clone()
    for name in ("none", "chunk_head", "deviation", "query", "full"):
        bench.tokens([bench.plan([bench.ids(9, 1), chunk], bench.ids(8, 2), make_selector(name))])
    assert bench.store.get(chunk).kv.equal(before)
