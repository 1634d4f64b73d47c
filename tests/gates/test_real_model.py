"""G2, G3, G5 and G8 on the bundled SmolLM2-135M in fp32 and bf16.

Tolerances are on log-probabilities. In fp32 a second exact computation differs by about 1e-4. In bf16 it differs by
some tenths (kernels add in other orders, and every layer rounds to 8 bits), so logits are compared by the divergence
KL(full || blend) in nats and the likeliest token where full prefill is sure of it; tokens are compared in fp32 only.
"""

import pytest
import torch

from cacheblend.selectors import make_selector

MAX_ERROR_FP32 = 2e-3
MAX_KL_BF16 = 2e-2
FACTS = (
    "The lighthouse of Harrowmere was painted bright green in the spring after the great storm. "
    "Its keeper, old Tamsin Vell, rows to the island every Monday with oil and bread.",
    "The harbour office of Port Selwick opens at nine o'clock. Fishing boats must show a yellow lamp at night.",
)
QUESTION = "\nQuestion: What colour is the lighthouse of Harrowmere?\nAnswer: The lighthouse of Harrowmere is painted"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def real(request, load_bench, smollm2):
    """The bundled model in both dtypes."""
    return load_bench(smollm2, dtype=request.param)


@pytest.fixture(scope="module")
def words(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return lambda text: tuple(tokenizer(text, add_special_tokens=False).input_ids), tokenizer


def check_same(got, want, dtype):
    got, want = got.log_softmax(-1), want.log_softmax(-1)
    if dtype == torch.float32:
        assert (got - want).abs().max() <= MAX_ERROR_FP32
    else:
        assert float((want.exp() * (want - got)).sum()) <= MAX_KL_BF16
    assert got.argmax() == want.argmax()


def test_g2_on_the_real_model(real, words):
    encode, _ = words
    system = encode("Answer from the documents.\n")
    chunk = real.collect(encode(" ".join(FACTS)), system)
    plan = real.plan([chunk], encode(QUESTION), make_selector("none"), system)
    check_same(real.logits(plan), real.full(plan.token_ids), real.oracle.dtype)


@pytest.mark.parametrize("name", ["chunk_head", "deviation", "query"])
def test_g3_on_the_real_model(real, words, name):
    encode, _ = words
    system = encode("Answer from the documents.\n")
    chunks = [real.collect(encode(text), system) for text in FACTS]
    plan = real.plan(chunks[::-1], encode(QUESTION), make_selector(name, 1.0), system)
    check_same(real.logits(plan), real.full(plan.token_ids), real.oracle.dtype)
    if real.oracle.dtype == torch.float32:
        assert real.tokens([plan], 4) == [real.oracle_tokens(plan.token_ids, 4)]


def test_g5_on_the_real_model(real, words):
    encode, _ = words
    chunks = [real.collect(encode(text)) for text in FACTS]
    plans = [
        real.plan(order, encode(QUESTION), make_selector(name))
        for order, name in ((chunks, "deviation"), (chunks[::-1], "query"), (chunks, "chunk_head"))
    ]
    alone = [real.logits(plan) for plan in plans]
    again = [real.logits(plan) for plan in plans]
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    for one, together in zip(alone, real.logits_together(plans), strict=True):
        check_same(together, one, real.oracle.dtype)
    if real.oracle.dtype == torch.float32:
        tokens = [real.tokens([plan], 4)[0] for plan in plans]
        assert real.tokens(plans, 4) == tokens
        assert real.tokens(plans, 4) == tokens


@pytest.mark.parametrize("name", ["full", "chunk_head", "deviation", "query"])
def test_g8_on_the_real_model(real, words, name):
    encode, tokenizer = words
    chunks = [real.collect(encode(text)) for text in FACTS]
    blanks = [real.collect(encode(" the" * len(c.token_ids))[: len(c.token_ids)]) for c in chunks]
    told, blank = (
        tokenizer.decode(real.tokens([real.plan(some, encode(QUESTION), make_selector(name))], 3)[0])
        for some in (chunks, blanks)
    )
    assert "green" in told
    assert "green" not in blank
