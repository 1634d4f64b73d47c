"""CacheBlend's three recipes on `VllmRunner` give what they give on the reference runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheblend.errors import BlendError
from cacheblend.sampling_params import SamplingParams

pytest.importorskip("vllm")

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
START = [1]
CHUNKS = [list(range(100, 140)), list(range(600, 630)), list(range(300, 350))]
QUESTION = [1010, 70, 550, 2010, 900, 140, 330]
PROMPT = [*START, *(token for chunk in CHUNKS for token in chunk), *QUESTION]
REUSABLE = len(PROMPT) - len(QUESTION)


@pytest.fixture(autouse=True)
def switched_off_afterwards(runner, reference):
    yield
    for each in (runner, reference.runner):
        each.cache_fuse_metadata.update(collect=False, check=False, selector="deviation", recomp_ratio=0.15)


def collect(runner: Any) -> list[list[torch.Tensor]]:
    """As CacheBlend's examples do it: each chunk behind the start alone, the start's rows cut off again."""
    runner.cache_fuse_metadata["collect"] = True
    parts = []
    for index, chunk in enumerate(CHUNKS):
        runner.generate([*START, *chunk], SamplingParams(max_tokens=1))
        cut = 0 if index == 0 else len(START)
        parts.append([[part[cut:] for part in layer.self_attn.hack_kv] for layer in runner.layers])
    runner.cache_fuse_metadata["collect"] = False
    return [[torch.cat(kinds) for kinds in zip(*layers, strict=True)] for layers in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def old_kvs(runner, reference):
    """Collected by vLLM, and by the reference runner."""
    return collect(runner), collect(reference.runner)


def blend(runner: Any, old_kvs: Any, **switches: Any) -> tuple[list[int], Any]:
    """The prompt's first tokens and its report with these switches."""
    runner.old_kvs = old_kvs
    runner.cache_fuse_metadata.update(check=True, suffix_len=len(QUESTION), **switches)
    name = runner.prefill(PROMPT, GREEDY)
    tokens: list[int] = []
    finished: Any = {}
    while name not in finished:
        step = runner.step()
        tokens.extend(step.tokens.get(name, ()))
        finished = step.finished
    report = runner.report(name)
    runner.release(name)
    return tokens, report


def files(pipeline: Any) -> set[str]:
    return {
        str(path) for path in pipeline.config.cache_dir.rglob("*") if path.is_dir() or path.suffix == ".safetensors"
    }


def test_hack_kv_is_what_the_reference_runner_keeps(old_kvs):
    mine, theirs = old_kvs
    assert len(mine) == len(theirs)
    for ours, other in zip(mine, theirs, strict=True):
        for part, expected in zip(ours, other, strict=True):
            assert part.shape == (REUSABLE, 2 * 32)
            torch.testing.assert_close(part, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("selector", ["deviation", "query", "none"])
def test_a_blend_of_old_kvs_gives_the_reference_runners_tokens_and_rows(runner, reference, old_kvs, selector):
    mine, theirs = old_kvs
    tokens, report = blend(runner, mine, selector=selector, recomp_ratio=0.0 if selector == "none" else 0.15)
    expected, their_report = blend(
        reference.runner, theirs, selector=selector, recomp_ratio=0.0 if selector == "none" else 0.15
    )
    assert tokens == expected
    assert (report.mode, report.reused_tokens, report.rows) == ("blend", REUSABLE, their_report.rows)


def test_recomputing_everything_is_full_prefill_and_other_old_kvs_of_the_same_ids_are_not_mixed_up(
    runner, old_kvs, pipeline
):
    exact, before = runner.generate(PROMPT, GREEDY), files(pipeline)
    assert blend(runner, old_kvs[0], recomp_ratio=1.0)[0] == exact
    reused = blend(runner, old_kvs[0], recomp_ratio=0.0)[0]
    zeros = [[torch.zeros_like(part) for part in layer] for layer in old_kvs[0]]
    assert blend(runner, zeros, recomp_ratio=0.0)[0] != reused
    assert files(pipeline) == before


def test_hack_kv_is_read_when_it_is_indexed_and_only_of_the_last_prompt(runner):
    runner.cache_fuse_metadata["collect"] = True
    runner.generate([*START, *CHUNKS[0]], GREEDY)
    before = runner.layers[0].self_attn.hack_kv
    runner.generate([*START, *CHUNKS[1]], GREEDY)
    k, v = runner.layers[-1].self_attn.hack_kv
    with pytest.raises(IndexError):
        runner.layers[0].self_attn.hack_kv[2]
    assert len(k) == len(v) == len(runner.layers[0].self_attn.hack_kv[1]) == 1 + len(CHUNKS[1])
    with pytest.raises(BlendError, match="collect it again"):
        before[0]
    with pytest.raises(TypeError):
        before[0] = k
    with pytest.raises(AttributeError):
        runner.layers[0].self_attn.hack_kv = [k, v]


def test_wrong_switches_and_old_kvs_are_refused_and_leave_no_file(runner, old_kvs, pipeline):
    left = files(pipeline)
    for kvs, switches, words in (
        (None, {}, "needs runner.old_kvs with .* all 4 layers"),
        (old_kvs[0], {"check_layers": [9]}, "beyond the model's 4 layers"),
        (old_kvs[0], {"selector": "nearest"}, "'nearest' is unknown"),
        ([[part[:5] for part in layer] for layer in old_kvs[0]], {}, "hold 5 rows"),
    ):
        runner.cache_fuse_metadata.update(check_layers=[1], selector="deviation")
        with pytest.raises(BlendError, match=words):
            blend(runner, kvs, **switches)
    runner.cache_fuse_metadata["check_layers"] = [1]
    assert files(pipeline) == left


def test_without_a_folder_the_recipes_are_refused(runner, monkeypatch):
    from kvstore.store import ChunkStore

    monkeypatch.setattr(runner._recipes, "_store", ChunkStore(None, 0))
    for switch in ("collect", "check"):
        runner.cache_fuse_metadata.update(collect=False, check=False)
        runner.cache_fuse_metadata[switch] = True
        with pytest.raises(BlendError, match="give the runner one"):
            runner.generate(PROMPT, GREEDY)
