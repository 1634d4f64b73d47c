"""G3 and G5 on the bundled real model in bf16, where two exact runs differ as well."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
from engine_bench import Ask
from engine_configs import CONFIGS, EngineConfig, start

pytestmark = pytest.mark.matrix

LIKELY = -9.0
"""Log-probabilities above it are compared: bf16 leaves nothing to compare in the far tail of 49,152 tokens."""

FLOOR_AT_MOST = 0.3
"""Between two exact runs, vLLM's and transformers'; the gates allow twice what it is."""


def likely_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference of log-probabilities among the tokens that either finds likely."""
    likely = (got > LIKELY) | (want > LIKELY)
    return float((got - want)[likely].abs().max())


def test_g3_and_g5_hold_on_the_real_model_in_bf16(tmp_path, smollm2, monkeypatch):
    config = EngineConfig("", engine={"dtype": "bfloat16", "max_model_len": 2048}, in_process=False)
    monkeypatch.setitem(CONFIGS, "smollm2", config)
    monkeypatch.setattr("engine_bench.VOCABULARY", 49152)
    with start("smollm2", smollm2, tmp_path / "store") as engine:
        head, chunks = engine.ids(20, 1), [engine.ids(60 + 10 * i, 10 + i) for i in range(3)]
        engine.collect(chunks, head)
        parts = ((head, False), *((chunk, True) for chunk in chunks), (engine.ids(12, 5), False))
        plain = engine.one(Ask(parts, plain=True))
        floor = likely_error(plain.first, engine.full(Ask(parts)))
        assert floor <= FLOOR_AT_MOST
        whole = engine.one(Ask(parts, {"selector": "full"}))
        assert likely_error(whole.first, plain.first) <= 2 * floor
        for selector in ("chunk_head", "deviation", "query"):
            ask = Ask(parts, {"selector": selector})
            answer = engine.one(ask)
            assert answer.meta["mode"] == "blend"
            assert likely_error(answer.first, engine.replayed(ask, answer, head)[0]) <= 2 * floor
            assert torch.isfinite(answer.first).all()
