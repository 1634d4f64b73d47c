"""The engines that the gates run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine_bench import EngineBench, running

ON_GPU = torch.cuda.is_available()
if ON_GPU:
    # vLLM's Triton attention multiplies fp32 in TF32 unless told otherwise.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


@dataclass(frozen=True)
class EngineConfig:
    """One engine: the model's variant, the connector's settings, vLLM's options."""

    variant: str
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    in_process: bool = True
    in_matrix_only: bool = False
    connector: bool = True
    environment: dict[str, str] = field(default_factory=dict)


SMALL_BUDGET = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}
SMALL_STEPS = {"max_rows_per_step": 70}
SMALL_STORE = {"host_budget_bytes": 200_000}
"""Less than most chunks of the tests need, let alone a request: their KV is read from disk when it is used."""
TINY_POOL = {"num_gpu_blocks_override": 40, "max_model_len": 1184}
GRAPHS_OF_OURS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}
"""On a GPU the blend's own CUDA graphs, which other engines here go without, and none of vLLM's."""
EVERYTHING = {"settings": SMALL_STEPS, "engine": SMALL_BUDGET}

CONFIGS = {
    "llama": EngineConfig("llama-default", {"accept_budgets": True}),
    "llama-tiny-pool": EngineConfig("llama-default", {**SMALL_STEPS, **SMALL_STORE}, {**SMALL_BUDGET, **TINY_POOL}),
    "llama-llama3": EngineConfig("llama-llama3", **EVERYTHING),
    "qwen2-yarn": EngineConfig("qwen2-yarn", **EVERYTHING),
    "qwen3-linear": EngineConfig("qwen3-linear", **EVERYTHING),
    "mistral-default": EngineConfig("mistral-default", **EVERYTHING),
    "llama-no-prefix-caching": EngineConfig(
        "llama-default", engine={"enable_prefix_caching": False}, in_matrix_only=True
    ),
    "llama-compiled": EngineConfig("llama-default", engine={"enforce_eager": False}, in_matrix_only=True),
    "llama-graphs": EngineConfig("llama-default", engine=GRAPHS_OF_OURS, in_matrix_only=True),
    "qwen3-graphs": EngineConfig("qwen3-linear", engine=GRAPHS_OF_OURS, in_matrix_only=True),
    "llama-process": EngineConfig("llama-default", in_process=False, in_matrix_only=True),
    "llama-tp2": EngineConfig(
        "llama-default",
        engine={"tensor_parallel_size": 2},
        in_process=False,
        in_matrix_only=True,
        # On a CPU, one core for each rank: vLLM itself would want a NUMA node each.
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    "llama-ngram": EngineConfig(
        "llama-default",
        engine={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        },
        in_process=False,
        in_matrix_only=True,
    ),
    "llama-gpu-pool": EngineConfig("llama-default", {"gpu_pool_bytes": 1 << 20}, in_matrix_only=True),
    "llama-runs": EngineConfig("llama-default", {"attention": "runs"}, in_matrix_only=True),
    "qwen3-yarn": EngineConfig("qwen3-yarn", **EVERYTHING, in_matrix_only=True),
    "qwen3-llama3": EngineConfig("qwen3-llama3", **EVERYTHING, in_matrix_only=True),
    "llama-yarn": EngineConfig("llama-yarn", **EVERYTHING, in_matrix_only=True),
}

TOLERANCE = 1e-4 if not ON_GPU else 1e-3
"""Of log-probabilities in fp32. On a GPU twice the difference between two exact runs in other batches; see the run."""

MOVED_TOLERANCE = 1e-4 if not ON_GPU else 2e-4
"""Of a moved key's elements: on a GPU the projections themselves differ by half of it from one batch to another."""


@contextmanager
def start(name: str, folder: Path, store: Path, **more: Any) -> Iterator[EngineBench]:
    """The engine called `name`, closed at the end."""
    config = CONFIGS[name]
    engine = {**config.engine, **more}
    if ON_GPU:
        engine = {"gpu_memory_utilization": 0.3, "attention_backend": "TRITON_ATTN", **engine}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.in_process else "1", **config.environment}
    with (
        _set(environment),
        running(folder, store, connector=config.connector, settings=config.settings, **engine) as bench,
    ):
        yield bench


@contextmanager
def _set(environment: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
