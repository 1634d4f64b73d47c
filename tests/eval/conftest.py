"""The tiny model that this room's commands are tried on."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory, make_tiny_model, smollm2) -> Path:
    """A random Llama with the bundled model's tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    make_tiny_model("llama-default", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def without_tokenizer(model, tmp_path) -> Path:
    """The same model in a folder that has no tokenizer."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model / name)
    return folder
