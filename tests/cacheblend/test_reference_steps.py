"""`ReferenceRunner.step`: what each step brings, how sequences end, and what is left behind."""

from __future__ import annotations

import pytest
from cacheblend_samples import plan_of
from transformers import AutoTokenizer

from cacheblend.errors import BlendError
from cacheblend.plan import full_prefill_plan
from cacheblend.protocols import FinishReason
from cacheblend.reference import blend as blending
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.sampling_params import SamplingParams
from cacheblend.selectors import make_selector
from cacheblend.selectors.deviation import DeviationSelector
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore
from kvstore.tiers import Tier

PROMPT = list(range(10, 40))
OTHER = list(range(100, 120))


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("llama-default")


@pytest.fixture
def runner(folder):
    runner = ReferenceRunner.from_folder(folder)
    yield runner
    assert not runner._sequences, "a test left a sequence behind"


@pytest.fixture(scope="module")
def reading_runner(make_tiny_model, smollm2, tmp_path_factory):
    """A tiny model with a real tokenizer, so that stop strings can be looked for."""
    folder = tmp_path_factory.mktemp("reading")
    make_tiny_model("llama-default", vocab_size=49152).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return ReferenceRunner.from_folder(folder)


def sampling(count=4, **settings):
    return SamplingParams(max_tokens=count, **{"ignore_eos": True, **settings})


def run(runner, names):
    """Steps until all of `names` have ended: their tokens, their reasons, all outputs."""
    tokens, reasons, outputs = {name: [] for name in names}, {}, []
    while len(reasons) < len(names):
        output = runner.step()
        outputs.append(output)
        for name, new in output.tokens.items():
            tokens[name].extend(new)
        reasons.update(output.finished)
    for name in names:
        runner.release(name)
    return tokens, reasons, outputs


def alone(runner, prompt, params):
    name = runner.prefill(prompt, params)
    tokens, reasons, _ = run(runner, [name])
    return tokens[name], reasons[name]


def test_every_step_gives_each_decoding_sequence_exactly_one_token(runner):
    runner.prefill(PROMPT, sampling(4), "a")
    outputs = [runner.step()]
    runner.prefill(OTHER, sampling(2), "b")
    outputs += [runner.step() for _ in range(3)]
    assert [set(output.tokens) for output in outputs] == [{"a"}, {"a", "b"}, {"a", "b"}, {"a"}]
    assert all(len(new) == 1 for output in outputs for new in output.tokens.values())
    assert [dict(output.finished) for output in outputs] == [
        {},
        {},
        {"b": FinishReason.LENGTH},
        {"a": FinishReason.LENGTH},
    ]
    runner.release("a")
    runner.release("b")


def test_step_ids_count_every_step_from_one(runner):
    assert [runner.step().step_id for _ in range(3)] == [1, 2, 3]
    runner.prefill(PROMPT, sampling(1), "a")
    assert runner.step().step_id == 4
    runner.release("a")


def test_a_sequence_that_waits_has_no_token_and_a_finished_one_no_more(runner):
    runner.prefill(PROMPT, sampling(1), "a")
    assert runner.report("a").mode == "full"
    assert runner.step().tokens.keys() == {"a"}
    output = runner.step()
    assert (dict(output.tokens), dict(output.finished)) == ({}, {})
    runner.release("a")


def test_a_sequence_ends_at_max_tokens_with_reason_length(runner):
    tokens, reason = alone(runner, PROMPT, sampling(5))
    assert (len(tokens), reason) == (5, FinishReason.LENGTH)


def test_a_stop_token_ends_the_sequence_and_is_its_last_token(runner):
    tokens, _ = alone(runner, PROMPT, sampling(6))
    place = next(i for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i])
    stopped, reason = alone(runner, PROMPT, sampling(6, stop_token_ids=(tokens[place],)))
    assert (stopped, reason) == (tokens[: place + 1], FinishReason.STOP)


def test_the_models_end_token_ends_the_sequence_unless_ignored(runner, folder):
    tokens, _ = alone(runner, PROMPT, sampling(6))
    place = next(i for i, token in enumerate(tokens) if i >= 1 and token not in tokens[:i])
    ending = ReferenceRunner.from_folder(folder)
    ending._forward.model.generation_config.eos_token_id = [tokens[place], 2]
    ending = ReferenceRunner(ending._forward.model)
    assert alone(ending, PROMPT, sampling(6, ignore_eos=False)) == (tokens[: place + 1], FinishReason.STOP)
    assert alone(ending, PROMPT, sampling(6)) == (tokens, FinishReason.LENGTH)


def test_a_stop_string_ends_the_sequence_though_it_spans_tokens(reading_runner):
    runner, tokenizer = reading_runner, reading_runner._stopping._tokenizer
    tokens, _ = alone(runner, PROMPT, sampling(8))
    texts = [tokenizer.decode(tokens[: i + 1], skip_special_tokens=True) for i in range(8)]
    stop = texts[4][len(texts[2]) - 1 :]
    assert len(stop) > len(texts[4]) - len(texts[3])
    first = next(i for i, text in enumerate(texts) if stop in text)
    got, reason = alone(runner, PROMPT, sampling(8, stop=("never this one", stop)))
    assert (got, reason) == (tokens[: first + 1], FinishReason.STOP)


def test_a_stop_string_in_the_middle_of_a_token_ends_the_sequence_too(reading_runner):
    runner, tokenizer = reading_runner, reading_runner._stopping._tokenizer
    tokens, _ = alone(runner, PROMPT, sampling(8))
    text = tokenizer.decode(tokens[:1], skip_special_tokens=True)
    stop = text[: len(text) // 2]
    assert stop
    assert not text.endswith(stop)
    assert alone(runner, PROMPT, sampling(8, stop=(stop,))) == (tokens[:1], FinishReason.STOP)


def test_a_stop_string_without_a_tokenizer_is_refused_before_anything_runs(runner):
    with pytest.raises(BlendError, match="Stop strings need a tokenizer"):
        runner.prefill(PROMPT, sampling(stop=("x",)))


def test_a_waiting_sequence_that_is_aborted_never_runs(runner):
    runner.prefill(PROMPT, sampling(), "a")
    runner.prefill(OTHER, sampling(2), "b")
    runner.abort("a")
    output = runner.step()
    assert set(output.tokens) == {"b"}
    assert output.finished == {"a": FinishReason.ABORT}
    run(runner, ["b"])
    runner.release("a")


def test_a_decoding_sequence_that_is_aborted_gets_no_more_tokens_and_others_go_on(runner):
    expected, _ = alone(runner, OTHER, sampling(4))
    runner.prefill(PROMPT, sampling(9), "a")
    runner.prefill(OTHER, sampling(4), "b")
    got = [runner.step().tokens["b"][0] for _ in range(2)]
    runner.abort("a")
    output = runner.step()
    assert set(output.tokens) == {"b"}
    assert output.finished == {"a": FinishReason.ABORT}
    got += [output.tokens["b"][0], runner.step().tokens["b"][0]]
    assert got == expected
    runner.abort("a")
    assert dict(runner.step().finished) == {}
    runner.release("a")
    runner.release("b")


def test_aborting_or_releasing_what_is_unknown_or_finished_changes_nothing(runner):
    runner.abort("nobody")
    runner.release("nobody")
    runner.prefill(PROMPT, sampling(1), "a")
    assert runner.step().finished == {"a": FinishReason.LENGTH}
    runner.abort("a")
    assert dict(runner.step().finished) == {}
    runner.release("a")
    runner.release("a")
    with pytest.raises(KeyError):
        runner.report("a")


def test_an_id_that_was_aborted_and_released_can_be_used_again_at_once(runner):
    """The old sequence's end must not be taken for the new one's."""
    runner.prefill(PROMPT, sampling(), "a")
    runner.abort("a")
    runner.release("a")
    runner.prefill(PROMPT, sampling(2), "a")
    assert dict(runner.step().finished) == {}
    assert runner.step().finished == {"a": FinishReason.LENGTH}
    runner.release("a")


def test_an_id_used_again_draws_as_if_it_were_new(runner):
    drawing = sampling(6, temperature=1.0, seed=3)
    first, second = (
        run(runner, [runner.prefill(PROMPT, drawing, "a")])[0]["a"],
        run(runner, [runner.prefill(PROMPT, drawing, "a")])[0]["a"],
    )
    assert first == second


def test_an_id_in_use_is_refused_and_the_sequence_that_has_it_goes_on(runner):
    runner.prefill(PROMPT, sampling(2), "a")
    with pytest.raises(BlendError, match="'a' is in use"):
        runner.prefill(OTHER, sampling(), "a")
    assert run(runner, ["a"])[0] == {"a": alone(runner, PROMPT, sampling(2))[0]}


def test_ids_are_made_up_where_none_are_given(runner):
    names = [runner.prefill(PROMPT, sampling(1)) for _ in range(3)]
    assert len(set(names)) == 3
    run(runner, names)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        (list(range(3, 253)) * 40, SamplingParams(), "10000 tokens and 64 new ones do not fit .* 8192"),
        (PROMPT, SamplingParams(max_tokens=8192), "do not fit"),
        ([*PROMPT, 256], SamplingParams(), "Token id 256 is outside the model's vocabulary of 256"),
        ([-1, *PROMPT], SamplingParams(), "Token id -1 is outside"),
        ([], SamplingParams(), "no tokens"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_at_once_and_others_are_served(runner, prompt, params, words):
    runner.prefill(OTHER, sampling(2), "b")
    with pytest.raises(BlendError, match=words):
        runner.prefill(prompt, params)
    run(runner, ["b"])


def test_a_check_layer_beyond_the_model_is_refused_at_once_and_others_are_served(folder):
    runner = ReferenceRunner.from_folder(folder, ChunkStore(None, 1 << 20))
    runner.collect([PROMPT], ())
    chunk = ChunkIdentity(runner.fingerprint, (), tuple(PROMPT))
    runner.prefill(OTHER, sampling(2), "b")
    with pytest.raises(BlendError, match="check layer 4 is beyond the model's 4 layers"):
        runner.prefill(plan_of([chunk], DeviationSelector(0.2, (1, 4))), sampling())
    assert run(runner, ["b"])[1] == {"b": FinishReason.LENGTH}


def test_generate_leaves_nothing_behind_even_when_a_step_fails(runner, monkeypatch):
    def broken(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner._blend, "run", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        runner.generate(PROMPT)
    monkeypatch.undo()
    assert len(runner.generate(PROMPT, sampling(2))) == 2


def test_streams_of_several_sequences_are_each_in_order(runner):
    """Whatever joins or leaves, each sequence's tokens are its own, one after the other."""
    prompts = {"a": PROMPT, "b": OTHER, "c": PROMPT[::-1]}
    counts = {"a": 6, "b": 2, "c": 4}
    expected = {name: alone(runner, prompts[name], sampling(counts[name]))[0] for name in prompts}
    got: dict[str, list[int]] = {name: [] for name in prompts}
    for step in range(8):
        if step in (0, 1, 3):
            name = "abc"[(0, 1, None, 2)[step]]
            runner.prefill(prompts[name], sampling(counts[name]), name)
        for name, tokens in runner.step().tokens.items():
            got[name].extend(tokens)
    assert got == expected
    for name in prompts:
        runner.release(name)


def test_a_full_prefill_reports_nothing_reused(runner):
    name = runner.prefill(full_prefill_plan(PROMPT), sampling(1))
    runner.step()
    report = runner.report(name)
    assert (report.mode, report.selector, report.reused_tokens, report.rows) == ("full", None, 0, ())
    assert report.parts_ms["question"] > 0
    runner.release(name)


@pytest.mark.parametrize("name", ["query", "deviation", "chunk_head+query"])
def test_a_blend_that_recomputes_everything_measures_nothing(folder, monkeypatch, name):
    def measured(*args):
        raise AssertionError("something was measured")

    runner = ReferenceRunner.from_folder(folder, ChunkStore(None, 1 << 26))
    runner.collect([OTHER], ())
    chunk = ChunkIdentity(runner.fingerprint, (), tuple(OTHER))
    monkeypatch.setattr(blending, "question_tally", measured)
    monkeypatch.setattr(blending.BlendedPrefill, "_narrow", measured)
    report = runner.score(plan_of([chunk], make_selector(name, 1.0), PROMPT, OTHER))[1]
    assert (report.mode, report.recomputed_ratio) == ("blend", 1.0)
    assert report.rows == tuple(range(len(OTHER), 2 * len(OTHER)))
    with pytest.raises(AssertionError, match="something was measured"):
        runner.score(plan_of([chunk], make_selector(name, 0.99), PROMPT, OTHER))


@pytest.mark.parametrize("name", ["full", "query", "deviation"])
def test_a_blend_that_recomputes_everything_reads_nothing_and_is_the_same_though_its_chunk_is_gone(folder, name):
    store = ChunkStore(None, 1 << 26)
    runner = ReferenceRunner.from_folder(folder, store)
    runner.collect([OTHER], ())
    chunk = ChunkIdentity(runner.fingerprint, (), tuple(OTHER))
    plan = plan_of([chunk], make_selector(name, 1.0), PROMPT)
    before, report = runner.score(plan)
    assert report.bytes_loaded == {}
    store.evict(chunk.key, Tier.HOST)
    after, report = runner.score(plan)
    assert after.equal(before)
    assert (report.reused_tokens, report.bytes_loaded, report.fallback_reasons) == (len(OTHER), {}, ())


@pytest.mark.parametrize("seed", [-1, 2**63, 99999999999999999999999])
def test_a_seed_that_no_generator_takes_is_refused_before_anything_runs(seed):
    with pytest.raises(BlendError, match=f"seed is {seed}"):
        SamplingParams(temperature=1.0, seed=seed)
