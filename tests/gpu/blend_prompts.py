"""What the measuring scripts ask the engine: prompts over chunks, arms, and one request's time to first token."""

from __future__ import annotations

import random
import time
import uuid
from typing import Any

import torch
from vllm import SamplingParams

SYSTEM, CHUNK, QUESTION = 64, 640, 64
_BARE = {"carry_drift": False}
ARMS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "reuse": {"selector": "none"},
    "chunk_head 16": {"selector": "chunk_head", "head_tokens": 16, **_BARE},
    "deviation 15 %": {"selector": "deviation", "ratio": 0.15, **_BARE},
    "query 15 %": {"selector": "query", "ratio": 0.15, **_BARE},
    "query 15 %, drift": {"selector": "query", "ratio": 0.15, "carry_drift": True},
    "chunk_head+query 15 %": {"selector": "chunk_head+query", "ratio": 0.15, **_BARE},
    # 15 % of nine chunks' rows: the first one, behind the system prompt, is exact and spared.
    "chunk_head 108": {"selector": "chunk_head", "head_tokens": 108, **_BARE},
}
"""Options of the requests by arm."""


class Prompts:
    """Prompts over the same chunks in ever new orders, with ever new questions.

    Args:
        chunks: of the corpus.
        seed: of everything drawn.
        a_prompt: chunks drawn for each prompt; all by default.
    """

    def __init__(self, chunks: int, seed: int = 0, a_prompt: int | None = None) -> None:
        self._random = random.Random(seed)
        self._a_prompt = chunks if a_prompt is None else a_prompt
        self.system = self.ids(SYSTEM)
        self.chunks = [self.ids(CHUNK) for _ in range(chunks)]

    def ids(self, count: int) -> list[int]:
        """New token ids."""
        return [self._random.randrange(1000, 100_000) for _ in range(count)]

    def next(self, options: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """(ids, kv_transfer_params)."""
        order = self._random.sample(self.chunks, self._a_prompt)
        ids = [*self.system, *(token for chunk in order for token in chunk), *self.ids(QUESTION)]
        segments = [
            {"tokens": SYSTEM, "reuse": False},
            *({"tokens": CHUNK, "reuse": True} for _ in order),
            {"tokens": QUESTION, "reuse": False},
        ]
        return ids, {"cacheblend": {"version": 1, "segments": segments, **options}}


def sampling(transfer: dict[str, Any] | None, tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens."""
    extra = {"kv_transfer_params": transfer} if transfer else None
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)


def collect(llm: Any, prompts: Prompts) -> float:
    """Have the engine collect the chunks; seconds it took."""
    started = time.perf_counter()
    params = sampling({"cacheblend": {"version": 1, "collect": SYSTEM}}, 2)
    asked = [{"prompt_token_ids": [*prompts.system, *chunk]} for chunk in prompts.chunks]
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert all(output.kv_transfer_params["cacheblend"]["on_host"] for output in outputs)
    return time.perf_counter() - started


def first_token(llm: Any, prompts: Prompts, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Milliseconds to the first token of one request, and its account. Full prefill finds nothing in a prefix cache."""
    salt = uuid.uuid4().hex if options.get("policy") == "full" else None
    milliseconds, output = _time(llm, *prompts.next(options), salt)
    return milliseconds, output.kv_transfer_params["cacheblend"]


def plain_first_token(llm: Any, prompts: Prompts, length: int) -> float:
    """Milliseconds to the first token of a request of new ids without a plan."""
    return _time(llm, prompts.ids(length), None)[0]


def _time(llm: Any, ids: list[int], transfer: dict[str, Any] | None, salt: str | None = None) -> tuple[float, Any]:
    # Several tokens: how long a blend's stages took is known some steps after it.
    params = sampling(transfer, 5)
    engine = llm.llm_engine
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.add_request(uuid.uuid4().hex, {"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})}, params)
    first: float | None = None
    while True:
        for output in engine.step():
            first = first or time.perf_counter()
            if output.finished:
                return (first - started) * 1e3, output
