"""Drawing tokens: reproducible, within top-k and top-p, and never failing for a legal temperature."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.reference.runner import ReferenceRunner
from cacheblend.reference.token_sampler import TokenSampler
from cacheblend.sampling_params import SamplingParams

PROMPT = list(range(10, 40))
LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0, 2.5])


@pytest.fixture(scope="module")
def runner(tiny_folder):
    return ReferenceRunner.from_folder(tiny_folder("llama-default"))


def drawn(params, count=300, logits=LOGITS):
    """The set of tokens that `count` draws with seeds 0, 1, ... give."""
    sampler = TokenSampler()
    sampling = [SamplingParams(**{**params, "seed": seed}) for seed in range(count)]
    return {sampler.draw(str(seed), logits, one) for seed, one in enumerate(sampling)}


def test_the_same_seed_gives_the_same_tokens_and_another_one_others(runner):
    def sample(seed):
        return runner.generate(PROMPT, SamplingParams(max_tokens=8, temperature=1.0, seed=seed, ignore_eos=True))

    assert sample(3) == sample(3)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1


def test_without_a_seed_each_sequence_draws_anew(runner):
    params = SamplingParams(max_tokens=8, temperature=2.0, ignore_eos=True)
    assert len({tuple(runner.generate(PROMPT, params)) for _ in range(4)}) > 1


def test_greedy_is_the_likeliest_token_whatever_the_seed():
    assert drawn({"temperature": 0.0}, 5) == {1}


@pytest.mark.parametrize(("k", "allowed"), [(1, {1}), (2, {1, 5}), (3, {1, 3, 5}), (0, set(range(6)))])
def test_top_k_draws_from_the_k_likeliest_only_and_from_all_of_them(k, allowed):
    assert drawn({"temperature": 2.0, "top_k": k}) == allowed
    assert drawn({"temperature": 2.0, "top_k": 99}) == set(range(6))


def test_top_p_draws_from_the_smallest_set_that_holds_the_mass():
    """At temperature 1 the probabilities are about 0.47, 0.29, 0.17, 0.06, ... in order of likelihood."""
    mass = LOGITS.softmax(-1).sort(descending=True).values.cumsum(-1).tolist()
    for kept, allowed in ((1, {1}), (2, {1, 5}), (3, {1, 3, 5})):
        assert drawn({"temperature": 1.0, "top_p": mass[kept - 1] - 0.01}) == allowed


def test_top_p_always_keeps_the_likeliest_token():
    assert drawn({"temperature": 1.0, "top_p": 1e-9}, 20) == {1}


def test_top_k_and_top_p_hold_together():
    assert drawn({"temperature": 5.0, "top_k": 3, "top_p": 0.5}) == {1, 5}


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-45, 1e-300, 5e-324])
def test_however_low_the_temperature_it_comes_to_greedy_and_never_fails(temperature):
    assert drawn({"temperature": temperature}, 10, LOGITS * 100) == {1}


def test_however_high_the_temperature_every_token_can_be_drawn():
    assert drawn({"temperature": 1e300}) == set(range(6))


def test_a_released_sequence_leaves_no_generator_behind():
    sampler = TokenSampler()
    params = SamplingParams(temperature=1.0, seed=1)
    first = [sampler.draw("a", LOGITS, params) for _ in range(6)]
    sampler.forget("a")
    assert [sampler.draw("a", LOGITS, params) for _ in range(6)] == first
    sampler.forget("a")
    assert not sampler._generators


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-50, 50), min_size=1, max_size=20),
    temperature=st.floats(0.0, 100.0),
    top_k=st.integers(0, 25),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**32),
)
def test_a_draw_is_a_token_no_less_likely_than_top_k_allows(values, temperature, top_k, top_p, seed):
    logits = torch.tensor(values)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    token = TokenSampler().draw("a", logits, params)
    assert 0 <= token < len(values)
    if top_k:
        assert logits[token] >= logits.sort(descending=True).values[min(top_k, len(values)) - 1]
