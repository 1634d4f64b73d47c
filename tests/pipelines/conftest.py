"""A tiny random language model with a real tokenizer, and the commands run in this process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
VOCABULARY = 4096


@pytest.fixture(scope="session")
def tiny_rag_model(
    make_tiny_model: Callable[..., Any], smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a tiny random Llama with a context of 4096 tokens, with SmolLM2's first 4096 tokens."""
    folder = tmp_path_factory.mktemp("tiny_rag") / "model"
    model = make_tiny_model(
        "llama-default",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    model.save_pretrained(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (smollm2 / name).exists():
            shutil.copyfile(smollm2 / name, folder / name)
    # A command loads the tokenizer anew; the whole one takes most of a test's time.
    tokenizer = json.loads((smollm2 / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < VOCABULARY}
    merges = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) in vocabulary]
    tokenizer["model"].update(vocab=vocabulary, merges=merges)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A tiny model on several threads spends its time waiting for them, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Callable[..., Any]:
    """Runs `cacheblend ...` or `precompute-chunk-cache ...` in this process, from the repository's root."""
    from pipelines.cli import main, precompute

    apps = {"cacheblend": main.app, "precompute-chunk-cache": precompute.app}
    monkeypatch.chdir(REPOSITORY)
    # Where vLLM is installed, `auto` would start it for the bundled model, which takes most of a minute.
    monkeypatch.setenv("ENGINE", "reference")

    def run(command: str, *args: object, stdin: str | bytes = "") -> Any:
        return CliRunner().invoke(apps[command], [str(arg) for arg in args], input=stdin)

    return run


@pytest.fixture
def tiny_options(tiny_rag_model: Path, tmp_path: Path) -> list[str]:
    """Options that run the tiny model on a cache of the test's own."""
    return ["--model", str(tiny_rag_model), "--cache-dir", str(tmp_path / "kv")]


@pytest.fixture(scope="session")
def tiny_llm(
    make_tiny_model: Callable[..., Any], tiny_rag_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a deeper tiny Llama, whose answers depend on every document; its context is 2048 tokens."""
    folder = tmp_path_factory.mktemp("tiny_llm") / "model"
    shutil.copytree(tiny_rag_model, folder)
    make_tiny_model("llama-default", vocab_size=VOCABULARY, max_position_embeddings=2048).save_pretrained(folder)
    return folder


@cache
def _embedder(folder: Path) -> Any:
    from retrieval.embedding import SentenceEmbedder

    return SentenceEmbedder(folder)


@pytest.fixture(scope="module")
def make_rag(tiny_llm: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Makes pipelines over the tiny model, each on a cache of its own unless told otherwise; closed at the end.

    They share one embedder, which takes longer to read than the model.
    """
    from pipelines.rag import RagPipeline

    made: list[RagPipeline] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(documents: Any = (), **settings: Any) -> RagPipeline:
        defaults = {
            "model": str(tiny_llm),
            "engine": "reference",
            "cache_dir": None if "cache_dir" in settings else tmp_path_factory.mktemp("kv"),
            "index_dir": None,
            "chunk_tokens": 128,
            "top_k": 3,
            "candidates": 2,
            "max_tokens": 6,
        }
        made.append(RagPipeline.from_documents(documents, **{**defaults, **settings}))
        made[-1]._corpus._load_embedder = lambda: _embedder(minilm)
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()
    torch.set_num_threads(threads)
