"""What tests of several rooms share: tiny random models of every supported kind, and the bundled real ones."""

from __future__ import annotations

import os
import signal
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from cacheblend.models.support import FAMILIES, ROPE_TYPES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Under `nohup` or `&` interrupts are ignored, here and in every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A new counterexample is welcome on a desk and a riddle in CI: there, the same examples are tried every time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
}
VARIANTS = tuple(f"{family}-{rope}" for family in FAMILIES for rope in ROPE_TYPES)
"""Every pair that `require_supported` lets in: none is accepted without its gates."""


def tiny_config(variant: str, **changes: Any) -> Any:
    """The configuration of a tiny model named `family-rope`."""
    from transformers import AutoConfig

    family, rope = variant.split("-")
    extra = {"sliding_window": None} if family == "mistral" else {}
    return AutoConfig.for_model(family, **{**_SHAPE, **extra, "rope_parameters": _ROPE[rope], **changes})


def tiny_model(variant: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose weights are scaled so that attention really mixes context."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(variant, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
                if "q_proj" in name or "k_proj" in name:
                    parameter.mul_(1.6)
    return model.eval()


@lru_cache(maxsize=len(VARIANTS))
def _tiny_folder(variant: str, root: str) -> Path:
    folder = Path(root) / variant
    tiny_model(variant).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each supported family and RoPE variant in turn."""
    return request.param


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    """From a variant's name to a saved tiny model's folder."""
    root = str(tmp_path_factory.mktemp("tiny"))
    return lambda variant: _tiny_folder(variant, root)


@pytest.fixture(scope="session")
def make_tiny_model():
    """The function that makes tiny random models."""
    return tiny_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The bundled real model's folder."""
    from pipelines.models import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The bundled real embedder's folder."""
    from pipelines.models import DEFAULT_EMBEDDER, resolve_embedder

    return resolve_embedder(DEFAULT_EMBEDDER)
