"""G8: blanking the chunks changes what a question that needs them gets."""

import pytest

from cacheblend.selectors import make_selector


@pytest.mark.parametrize("name", ["none", "chunk_head", "deviation", "query"])
def test_g8_other_chunks_give_other_logits(bench, max_error, name):
    question, system = bench.ids(9, 2), bench.ids(12, 3)
    chunks = [bench.collect(bench.ids(n, n)) for n in (90, 60)]
    blanks = [bench.collect([7] * n) for n in (90, 60)]
    told, blank = (bench.logits(bench.plan(some, question, make_selector(name), system)) for some in (chunks, blanks))
    assert max_error(told, blank) > 1e-1
