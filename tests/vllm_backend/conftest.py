"""Fixtures of the engine's tests: one engine at a time, each started once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HEAD_DIM = 32
"""vLLM's CPU attention has no smaller one."""


def _engines():
    pytest.importorskip("vllm")
    from engine_configs import CONFIGS

    return CONFIGS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `engine` run on all, or on those that `engines` names; some only in the matrix."""
    if "engine" not in metafunc.fixturenames:
        return
    configs = _engines()
    marker = metafunc.definition.get_closest_marker("engines")
    if marker is not None:
        configs = {name: configs[name] for name in marker.args}
    if only := os.environ.get("CACHEBLEND_TEST_ENGINES"):
        configs = {name: config for name, config in configs.items() if name in only.split(",")}
    names = [
        pytest.param(name, marks=[pytest.mark.matrix] if config.in_matrix_only else [], id=name)
        for name, config in configs.items()
    ]
    metafunc.parametrize("engine", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory, make_tiny_model):
    """From a variant's name to the folder of a tiny model with heads of 32."""
    made: dict[str, Path] = {}

    def folder(variant: str) -> Path:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp("wide") / variant
            make_tiny_model(variant, head_dim=HEAD_DIM, hidden_size=4 * HEAD_DIM).save_pretrained(made[variant])
        return made[variant]

    return folder


@pytest.fixture(scope="session")
def engine(request, tmp_path_factory, wide_folder):
    """A running engine with the connector; `engine.name` says which."""
    from engine_configs import CONFIGS, start

    name = request.param
    store = tmp_path_factory.mktemp("store")
    with start(name, wide_folder(CONFIGS[name].variant), store) as bench:
        bench.name = name
        yield bench


@pytest.fixture(scope="session")
def corpora():
    """Chunks collected once an engine."""
    return {}


@pytest.fixture
def corpus(engine, corpora):
    """A head and four chunks that the engine has collected."""
    from engine_cases import Corpus

    if engine not in corpora:
        corpora[engine] = Corpus(engine)
    return corpora[engine]
