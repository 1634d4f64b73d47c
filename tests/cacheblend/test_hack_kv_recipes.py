"""The three recipes of CacheBlend's users, in order, on the reference runner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cacheblend.errors import BlendError
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
START = [1]
CHUNKS = [list(range(10, 50)), list(range(60, 90)), list(range(30, 80))]
QUESTION = [101, 7, 55, 201, 90, 14, 33]
PROMPT = [*START, *(token for chunk in CHUNKS for token in chunk), *QUESTION]
REUSABLE = len(PROMPT) - len(QUESTION)


@dataclass
class Recipes:
    """A runner, and the same weights under transformers alone."""

    runner: ReferenceRunner
    oracle: Any
    folder: Path
    old_kvs: list[list[torch.Tensor]] = field(default_factory=list)

    @torch.inference_mode()
    def oracle_tokens(self, ids: list[int], count: int = 6) -> list[int]:
        ids = list(ids)
        for _ in range(count):
            ids.append(int(self.oracle(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[-count:]

    def blend(self, **switches: Any):
        """Prefill the prompt with these switches: its first tokens and its report."""
        self.runner.cache_fuse_metadata.update(switches)
        name = self.runner.prefill(PROMPT, GREEDY)
        tokens: list[int] = []
        for _ in range(GREEDY.max_tokens):
            tokens.extend(self.runner.step().tokens[name])
        report = self.runner.report(name)
        self.runner.release(name)
        return tokens, report


@pytest.fixture(scope="module", params=["llama-default", "qwen3-default", "llama-yarn"])
def recipes(request, tiny_folder) -> Recipes:
    folder = tiny_folder(request.param)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return Recipes(ReferenceRunner.from_folder(folder), oracle, folder)


def collect(runner: ReferenceRunner) -> list[list[torch.Tensor]]:
    """As CacheBlend's examples do it: each chunk behind the start alone, the start's rows cut off again."""
    old_kvs: list[list[torch.Tensor]] = []
    for index, chunk in enumerate(CHUNKS):
        runner.generate([*START, *chunk], SamplingParams(max_tokens=1))
        cut = 0 if index == 0 else len(START)
        parts = [[part[cut:] for part in layer.self_attn.hack_kv] for layer in runner.layers]
        if not old_kvs:
            old_kvs = parts
            continue
        old_kvs = [
            [torch.cat((old, new)) for old, new in zip(*pair, strict=True)] for pair in zip(old_kvs, parts, strict=True)
        ]
    return old_kvs


def test_the_three_recipes_in_order(recipes):
    runner = ReferenceRunner.from_folder(recipes.folder)
    recipes = replace(recipes, runner=runner)
    exact = recipes.oracle_tokens(PROMPT)

    # 1. Both flags False: full prefill.
    assert (runner.cache_fuse_metadata["collect"], runner.cache_fuse_metadata["check"]) == (False, False)
    assert runner.generate(PROMPT, GREEDY) == exact
    assert not hasattr(runner.layers[0].self_attn, "hack_kv")

    # 2. collect: each layer keeps [k, v] of the last prompt.
    runner.cache_fuse_metadata["collect"] = True
    runner.old_kvs = collect(runner)
    runner.cache_fuse_metadata["collect"] = False
    config = recipes.oracle.config
    assert len(runner.old_kvs) == config.num_hidden_layers
    for k, v in runner.old_kvs:
        assert k.shape == v.shape == (REUSABLE, config.num_key_value_heads * config.head_dim)

    # 3. check: blend.
    runner.cache_fuse_metadata.update(check=True, recomp_ratio=0.15, suffix_len=len(QUESTION))
    blended, report = recipes.blend()
    assert report.mode == "blend"
    assert report.reused_tokens == REUSABLE
    assert report.recomputed_tokens == len(report.rows) == round(0.15 * REUSABLE)
    assert max(report.rows) < REUSABLE
    assert recipes.blend(recomp_ratio=1.0)[0] == exact
    assert recipes.blend(recomp_ratio=0.15)[0] == blended

    # And both flags False again is full prefill again.
    runner.cache_fuse_metadata.update(check=False)
    assert runner.generate(PROMPT, GREEDY) == exact


@torch.inference_mode()
def test_hack_kv_is_the_models_own_kv_of_the_last_prompt_before_rope(recipes):
    runner, ids = recipes.runner, [*START, *CHUNKS[1]]
    runner.cache_fuse_metadata.update(check=False, collect=True)
    runner.generate([*START, *CHUNKS[0]], SamplingParams(max_tokens=1))
    runner.generate(ids, SamplingParams(max_tokens=1))
    runner.cache_fuse_metadata["collect"] = False
    cache = recipes.oracle(torch.tensor([ids]), use_cache=True).past_key_values
    cos, sin = recipes.oracle.model.rotary_emb(torch.empty(0), torch.arange(len(ids))[None])
    for layer, ours in enumerate(runner.layers):
        k, v = ours.self_attn.hack_kv
        theirs = cache.layers[layer]
        kv_heads, dim = theirs.keys.shape[1], theirs.keys.shape[3]
        heads_first = k.view(1, len(ids), kv_heads, dim).transpose(1, 2)
        rotated, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
        torch.testing.assert_close(rotated, theirs.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(v.view(len(ids), kv_heads, dim), theirs.values[0].transpose(0, 1), atol=1e-4, rtol=0)


@pytest.fixture
def ready(recipes) -> Recipes:
    """Collected, and ready for the third recipe."""
    runner = recipes.runner
    runner.cache_fuse_metadata.update(collect=True, check=False)
    if not recipes.old_kvs:
        recipes.old_kvs = collect(runner)
    runner.old_kvs = recipes.old_kvs
    runner.cache_fuse_metadata.update(
        collect=False, check=True, recomp_ratio=0.15, suffix_len=len(QUESTION), selector="deviation", check_layers=[1]
    )
    return recipes


def with_rows(old_kvs, start, end, value):
    """A copy in which rows `start` to `end` hold `value`, appended where there are none yet."""
    longer = [[torch.cat([part, part[:20]]) for part in layer] for layer in old_kvs]
    for layer in longer:
        for part in layer:
            part[start:end] = value
    return longer


@pytest.mark.parametrize("selector", ["deviation", "query", "none"])
def test_suffix_len_covers_the_question_whatever_old_kvs_hold_for_it(ready, selector):
    ready.runner.cache_fuse_metadata["selector"] = selector
    ready.runner.cache_fuse_metadata["recomp_ratio"] = 0.0
    plain, report = ready.blend()
    ready.runner.old_kvs = with_rows(ready.old_kvs, REUSABLE, REUSABLE + 20, float("nan"))
    poisoned, poisoned_report = ready.blend()
    assert poisoned == plain
    assert poisoned_report.rows == report.rows
    # One row earlier is reused, so the poison reaches the answer: the test can tell.
    ready.runner.old_kvs = with_rows(ready.old_kvs, REUSABLE - 1, REUSABLE + 20, float("nan"))
    assert ready.blend()[0] != plain


def test_every_token_of_a_longer_suffix_is_computed(ready):
    """With a suffix that reaches into the chunks, only what comes before it is taken from old_kvs."""
    longer = len(QUESTION) + len(CHUNKS[2])
    before = len(PROMPT) - longer
    ready.runner.old_kvs = with_rows(ready.old_kvs, before, REUSABLE, float("nan"))
    tokens, report = ready.blend(suffix_len=longer, recomp_ratio=1.0)
    assert report.reused_tokens == before
    assert tokens == ready.oracle_tokens(PROMPT)


def test_plain_reuse_of_what_was_collected_is_not_full_prefill(ready):
    """Chunks that never attended to one another give other logits: the recipe does reuse their KV."""
    ready.runner.cache_fuse_metadata["recomp_ratio"] = 0.0
    reused, report = ready.blend()
    assert report.recomputed_tokens == 0
    ready.runner.old_kvs = with_rows(ready.old_kvs, 0, REUSABLE, 0.0)
    assert ready.blend()[0] != reused


def test_rows_are_dropped_at_the_check_layers_asked_for(ready):
    _, once = ready.blend(check_layers=[1])
    _, later = ready.blend(check_layers=[2])
    assert once.recomputed_tokens == later.recomputed_tokens == round(0.15 * REUSABLE)
    assert later.recomputed_ratio > once.recomputed_ratio > 0.15


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"suffix_len": 0}, r"'suffix_len'\] is 0"),
        ({"suffix_len": len(PROMPT)}, rf"'suffix_len'\] is {len(PROMPT)}"),
        ({"suffix_len": len(PROMPT) + 5}, rf"'suffix_len'\] is {len(PROMPT) + 5}"),
        ({"suffix_len": len(QUESTION) - 1}, rf"hold {REUSABLE} rows but {REUSABLE + 1} come before"),
        ({"check_layers": [0]}, "start at 1"),
        ({"check_layers": [9]}, "check layer 9 is beyond the model's 4 layers"),
        ({"selector": "nearest"}, "'nearest' is unknown"),
    ],
)
def test_wrong_switches_are_refused_in_a_sentence_and_nothing_is_left_behind(ready, switches, words):
    ready.runner.cache_fuse_metadata.update(switches)
    with pytest.raises(BlendError, match=words):
        ready.runner.generate(PROMPT, GREEDY)
    ready.runner.cache_fuse_metadata.update(
        suffix_len=len(QUESTION), check_layers=[1], selector="deviation", recomp_ratio=1.0
    )
    assert ready.runner.generate(PROMPT, GREEDY) == ready.oracle_tokens(PROMPT)


def test_old_kvs_that_are_absent_short_or_strange_are_refused(ready):
    runner, kvs = ready.runner, ready.old_kvs
    for wrong, words in (
        (None, "needs runner.old_kvs with .* all 4 layers"),
        (kvs[:3], "needs runner.old_kvs with .* all 4 layers"),
        ([[part[: REUSABLE - 1] for part in layer] for layer in kvs], f"hold {REUSABLE - 1} rows but {REUSABLE} come"),
        ([[part[:, :-1] for part in layer] for layer in kvs], rf"shape \[{REUSABLE}, 31\]"),
    ):
        runner.old_kvs = wrong
        with pytest.raises(BlendError, match=words):
            runner.generate(PROMPT, GREEDY)
