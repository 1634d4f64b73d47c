"""Requests without a plan get what an engine without the connector gives, and so does an engine in its own process."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engine_bench import Ask
from engine_configs import CONFIGS, EngineConfig, start

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_plain_requests_are_answered_as_without_the_connector(tmp_path, wide_folder, monkeypatch, eager):
    given = {}
    for connector in (False, True):
        config = EngineConfig("llama-default", engine={"enforce_eager": eager}, in_process=False, connector=connector)
        monkeypatch.setitem(CONFIGS, "here", config)
        with start("here", wide_folder("llama-default"), tmp_path / "store") as engine:
            asks = [Ask(((engine.ids(90 + 40 * i, i), False),), plain=True) for i in range(6)]
            given[connector] = [engine.one(ask, tokens=12) for ask in asks]
    for without, with_it in zip(given[False], given[True], strict=True):
        assert with_it.tokens == without.tokens
        # Not to the bit: two processes place their weights at other addresses, and kernels round accordingly.
        assert (with_it.logprobs - without.logprobs).abs().max() <= 1e-5
        assert with_it.meta == {}
