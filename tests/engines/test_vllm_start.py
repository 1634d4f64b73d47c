"""What vLLM's engine cannot be started with is refused in one sentence, before any process is started."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from cacheblend.errors import BlendError
from cacheblend.vllm_backend.settings import ConnectorSettings
from pipelines.errors import PipelineError

pytest.importorskip("vllm")


@pytest.fixture
def make(wide_model, monkeypatch):
    """vLLM's configuration for the tiny model with some options; no engine."""
    from cacheblend.vllm_backend.engine_arguments import make_vllm_config

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    return lambda folder=wide_model, dtype="float32", **options: make_vllm_config(
        folder, ConnectorSettings(), dtype, options
    )


@pytest.fixture
def on_cpu(make):
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("room for running requests is counted out before the start on a CPU only")
    return make


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"colour": "red"}, "'colour' is no option"),
        ({"kv_transfer_config": None}, "'kv_transfer_config' is no option"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported"),
        ({"pipeline_parallel_size": 2}, "Pipeline parallelism is not supported"),
        ({"kv_cache_dtype": "fp8"}, "KV cache in fp8 is not supported"),
        ({"max_num_batched_tokens": -1}, "vLLM refuses the model in .*max_num_batched_tokens"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(make, options, words):
    with pytest.raises(BlendError, match=words) as refused:
        make(**options)
    assert "\n" not in str(refused.value)


def test_a_folder_without_a_model_is_named(make, tmp_path):
    with pytest.raises(BlendError, match=f"configuration could be read from {tmp_path}"):
        make(tmp_path)


def test_a_context_that_does_not_fit_the_memory_for_running_requests_is_refused(on_cpu):
    with pytest.raises(BlendError, match=r"1024 tokens does not fit the 0\.\d+ GiB .* hold 512; set VLLM_CPU_KVCACHE"):
        on_cpu(kv_cache_memory_bytes=1 << 20, max_model_len=1024)


def test_more_memory_than_there_is_is_refused(on_cpu, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1000000")
    with pytest.raises(BlendError, match=r"1e\+06 GiB .* are more than the [\d.]+ GiB of memory that are free"):
        on_cpu()


def test_without_a_wish_the_context_is_what_fits(on_cpu, wide_model):
    assert on_cpu().model_config.max_model_len == AutoConfig.from_pretrained(wide_model).max_position_embeddings
    assert on_cpu(kv_cache_memory_bytes=1 << 20).model_config.max_model_len == 512


def test_settings_that_have_a_name_of_their_own_are_refused_among_the_engines_options(settings):
    from pipelines.rag import RagPipeline

    for engine, options, words in (
        ("vllm", {"dtype": "bfloat16"}, "'dtype', which is a setting of its own"),
        ("reference", {"max_model_len": 5}, "`reference` takes no engine_options"),
    ):
        with pytest.raises(PipelineError, match=words):
            RagPipeline.from_documents([], **settings, engine=engine, engine_options=options)
