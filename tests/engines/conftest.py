"""One engine in this process for all tests of the runner and the pipeline; each file of this folder needs vLLM."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

VOCABULARY = 4096
CONTEXT = 2048
_running: list[Any] = []


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Only one engine can live in a process: this folder's ends with its last test."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        while _running:
            _running.pop().close()


@pytest.fixture(scope="session")
def wide_model(make_tiny_model: Any, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with heads of 32, which vLLM takes, and SmolLM2's first 4096 tokens."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    make_tiny_model(
        "llama-default", vocab_size=VOCABULARY, head_dim=32, max_position_embeddings=CONTEXT
    ).save_pretrained(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (smollm2 / name).exists():
            shutil.copyfile(smollm2 / name, folder / name)
    tokenizer = json.loads((smollm2 / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < VOCABULARY}
    merges = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) in vocabulary]
    tokenizer["model"].update(vocab=vocabulary, merges=merges)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def settings(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of pipelines over the tiny model and one cache folder."""
    return {
        "model": str(wide_model),
        "cache_dir": tmp_path_factory.mktemp("kv"),
        "index_dir": None,
        "chunk_tokens": 96,
        "max_tokens": 6,
        "host_budget_bytes": 1 << 28,
    }


@pytest.fixture(scope="session")
def pipeline(settings: dict[str, Any]) -> Any:
    """A pipeline whose engine is vLLM, in this process."""
    pytest.importorskip("vllm")
    from pipelines.rag import RagPipeline

    options = {
        "in_process": True,
        "block_size": 32,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "max_logprobs": -1,
        "connector": {"debug_rows": True},
    }
    made = RagPipeline.from_documents([], **settings, engine="auto", engine_options=options)
    _running.append(made)
    return made


@pytest.fixture(scope="session")
def reference(settings: dict[str, Any]) -> Iterator[Any]:
    """The same on the reference engine, over the same cache folder."""
    from pipelines.rag import RagPipeline

    made = RagPipeline.from_documents([], **settings, engine="reference")
    yield made
    made.close()


@dataclass
class Prompts:
    """Random token ids, and plans over them."""

    fingerprint: str
    seed: int = 0
    head: tuple[int, ...] = ()
    question: tuple[int, ...] = ()
    made: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.head, self.question = self.ids(37), self.ids(20)

    def ids(self, count: int) -> tuple[int, ...]:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(torch.randint(20, VOCABULARY, (count,), generator=generator).tolist())

    def plan(self, chunks: Any, selector: Any, fingerprint: str | None = None, question: Any = None) -> Any:
        from cacheblend.plan import BlendPlan, Segment, SegmentRole
        from kvstore.key import ChunkIdentity

        own = fingerprint or self.fingerprint
        reused = [Segment(SegmentRole.CHUNK, chunk, ChunkIdentity(own, self.head, chunk)) for chunk in chunks]
        asked = Segment(SegmentRole.QUESTION, question or self.question)
        return BlendPlan((Segment(SegmentRole.SYSTEM, self.head), *reused, asked), selector)


@pytest.fixture(scope="session")
def runner(pipeline: Any) -> Any:
    """The pipeline's runner, driven from here while the pipeline is not asked anything."""
    return pipeline.runner


@pytest.fixture(scope="session")
def prompts(runner: Any) -> Prompts:
    """Random prompts of this model."""
    return Prompts(runner.fingerprint)
