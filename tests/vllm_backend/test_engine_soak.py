"""A randomised soak: whatever happens, every answer equals the reference replaying its rows, and nothing is held.

Random corpora and orders, missing chunks, deleted and damaged files, evictions, aborts, preemptions, several
completions, plain requests beside blended ones, on an engine whose block pool, token budget and store are too small.

Half a minute in `make test`; `make soak` runs half an hour (CACHEBLEND_SOAK_SECONDS).
"""

from __future__ import annotations

import gc
import os
import random
import time

import pytest

pytest.importorskip("vllm")

import psutil
from engine_bench import Ask, error
from engine_cases import SELECTORS, prompt
from engine_configs import TOLERANCE

SECONDS = float(os.environ.get("CACHEBLEND_SOAK_SECONDS", "25"))
WAVE = 7
STEPS_TO_SETTLE = 40
"""Steps of 70 rows that the largest batch of blends can take."""
GROWTH_ALLOWED = 150 << 20
"""Bytes that the process may grow after its first waves: the reference runner's own caches included."""


class Soak:
    """Random waves of requests against one engine.

    Args:
        engine: the bench.
        seed: of everything that is drawn.
    """

    def __init__(self, engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.head = engine.ids(self.random.randrange(5, 60), 5000 + seed)
        self.chunks = [engine.ids(self.random.randrange(20, 140), 6000 + 50 * seed + i) for i in range(9)]
        self.serial = 0
        self.counts = dict.fromkeys(("blend", "full", "plain", "aborted"), 0)

    def wave(self) -> None:
        """Some requests at once, trouble while they run, and every answer checked."""
        self.trouble()
        asks = [self.draw() for _ in range(self.random.randrange(1, WAVE))]
        waiting = {self.engine.add(ask, tokens=self.random.randrange(1, 30)): ask for ask in asks}
        answers = {}
        while self.engine.engine.has_unfinished_requests():
            for output in self.engine.engine.step():
                if output.finished:
                    answers[output.request_id] = self.engine.answer(output)
            if self.random.random() < 0.04:
                self.trouble()
            if self.random.random() < 0.03 and len(waiting) > len(answers):
                victim = self.random.choice([r for r in waiting if r not in answers])
                self.engine.engine.abort_request([victim])
                del waiting[victim]
                self.counts["aborted"] += 1
        for request_id, ask in waiting.items():
            self.check(ask, answers[request_id])

    def draw(self) -> Ask:
        self.serial += 1
        chunks = [self.random.choice(self.chunks) for _ in range(self.random.randrange(1, 5))]
        fresh = [i for i in range(len(chunks)) if self.random.random() < 0.15]
        question = self.engine.ids(self.random.randrange(3, 30), 100_000 + self.serial % 40)
        options = {"selector": self.random.choice(SELECTORS)}
        if options["selector"] in ("deviation", "query") and self.random.random() < 0.5:
            options["ratio"] = round(self.random.random(), 2)
        sampling = {"n": 2, "temperature": 0.7} if self.random.random() < 0.1 else {}
        ask = prompt(self.head, chunks, question, fresh, **options)
        return Ask(ask.parts, ask.options, plain=self.random.random() < 0.2, sampling=sampling)

    def trouble(self) -> None:
        """Collect some chunks, lose some."""
        kind = self.random.random()
        if kind < 0.5:
            missing = self.random.sample(self.chunks, 2)
            for chunk in missing:
                self.engine.add_collect(chunk, self.head)
        elif kind < 0.7:
            files = list(self.engine.store_folder.rglob("*.safetensors"))
            if files:
                path = self.random.choice(files)
                if self.random.random() < 0.5:
                    path.unlink(missing_ok=True)
                else:
                    content = bytearray(path.read_bytes())
                    content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
                    path.write_bytes(bytes(content))
        elif kind < 0.85:
            self.engine.forget_host_copies()

    def check(self, ask: Ask, answer) -> None:
        self.counts["plain" if ask.plain else answer.meta["mode"]] += 1
        assert ask.plain or not any(r.startswith("blend_failed") for r in answer.meta["fallback_reasons"])
        if ask.sampling:
            assert len(answer.completions) == 2
            return
        want = self.engine.replayed(ask, answer, self.head, answer.tokens[:-1])
        assert error(answer.logprobs, want) <= TOLERANCE, (ask.options, answer.meta)

    def settle(self) -> None:
        """A few more steps: vLLM frees the pages of an aborted request once its blend has ended in the worker."""
        for _ in range(STEPS_TO_SETTLE):
            if self.held()[3] == 0:
                return
            self.engine.one(prompt(self.engine.ids(5, 1), [], self.engine.ids(4, 2)))

    def held(self) -> tuple[int, int, int, int]:
        """Pins, tracked requests, collects, and blocks in use."""
        half, pool = self.engine.scheduler_half, self.engine.scheduler.kv_cache_manager.block_pool
        blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return half.pinned(), len(half._tracked), len(half._collecting), blocks


@pytest.mark.engines("llama-tiny-pool")
@pytest.mark.timeout(SECONDS + 300)
def test_a_soak_of_everything_at_once(engine, caplog):
    started, seed, waves = time.monotonic(), 0, 0
    counts: dict[str, int] = {}
    memory = 0
    while time.monotonic() - started < SECONDS:
        soak = Soak(engine, seed)
        for _ in range(12):
            soak.wave()
            soak.settle()
            assert soak.held() == (0, 0, 0, 0)
        seed, waves = seed + 1, waves + 12
        for kind, count in soak.counts.items():
            counts[kind] = counts.get(kind, 0) + count
        # What the oracle has computed and what pytest has heard are not the engine's to hold.
        engine.forget_oracles_chunks()
        caplog.clear()
        gc.collect()
        now = psutil.Process().memory_info().rss
        memory = memory if seed > 2 else now
        if seed % 20 == 0:
            print(f"{waves} waves: {now >> 20} MiB, {counts}", flush=True)
        assert now - memory < GROWTH_ALLOWED
    print(f"{waves} waves: {counts}")
    assert counts["blend"] > 10
    assert counts["plain"] > 5
