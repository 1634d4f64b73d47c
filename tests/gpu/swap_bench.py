"""The engine whose chunks are swapped, what makes it swap, and what times its copies; see measure_swapping.py."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from blend_prompts import SYSTEM, Prompts, first_token, sampling
from hardware import mark

from cacheblend.protocols import Advice
from cacheblend.vllm_backend.placement import StagedPlacement
from cacheblend.vllm_backend.request_format import CollectParams
from kvstore.layer_copies import LayerCopies
from kvstore.tiers import Tier


class Swapper:
    """Stands for the predictor: while `on`, it expects the next chunks of a circle for certain.

    Args:
        scheduler: the engine's, to see which of them are coming or there.
        chunks: the circle.
        ahead: how many shall be on their way.
    """

    def __init__(self, scheduler: Any, chunks: Sequence[Any], ahead: int) -> None:
        self.on = False
        self._gpu = scheduler._memory[Tier.GPU]
        self._catalogue = scheduler._catalogue
        self._circle = cycle(chunks)
        self._count = len(chunks)
        self._ahead = ahead
        self._pending: list[Any] = []

    def observe(self, event: Any) -> None:
        """Nothing to learn."""

    def close(self) -> None:
        """Nothing to close."""

    def advice(self, limit: int) -> list[Advice]:
        if not self.on:
            return []
        self._pending = [chunk for chunk in self._pending if self._gpu.is_coming(chunk.key)]
        given: list[Advice] = []
        if len(self._pending) >= self._ahead:
            return given
        for chunk, _ in zip(self._circle, range(self._count), strict=False):
            there = self._catalogue[chunk.key][2] & self._gpu.place or self._gpu.is_coming(chunk.key)
            if not there:
                given.append(Advice(chunk, 1.0))
                self._pending.append(chunk)
            if len(given) == limit or len(self._pending) >= self._ahead:
                break
        return given


class PlainCopies:
    """Stands for swapping without a decision: while `on`, a thread keeps the link busy with copies of the same chunks.

    What decoding loses beside it, it loses to the copies themselves.

    Args:
        sources: [..] page-locked tensors of one shape and dtype, copied in a circle.
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.on = False
        self.nbytes = 0
        self._circle = cycle(sources)
        self._room = torch.empty_like(sources[0], device="cuda")
        self._stream = torch.cuda.Stream()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        asked: deque[torch.cuda.Event] = deque()
        while not self._ended.is_set():
            if not self.on:
                time.sleep(1e-3)
                continue
            source = next(self._circle)
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._room.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
            asked.append(done)
            # As much ahead as the prefetcher has: the wait is the driver's, without the interpreter.
            while len(asked) > 3:
                asked.popleft().synchronize()
                self.nbytes += source.nbytes


class Bench:
    """The engine in this process, and those of its parts that are looked at."""

    def __init__(self, llm: Any, pool_bytes: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.llm = llm
        self.pool_bytes = pool_bytes
        self.half = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_half
        self.traffic = self.half._traffic
        self.scheduler = self.traffic._scheduler
        held = get_kv_transfer_group()._worker_half._held
        self.store, self.prefetcher = held.store, held.prefetcher
        self.told: list[tuple[float, Any]] = []
        take_report = self.half.take_report

        def listen(report: Any) -> None:
            self.told.extend((time.perf_counter(), result) for _, result in report.transfers)
            take_report(report)

        self.half.take_report = listen

    def identities(self, prompts: Prompts) -> list[Any]:
        asked = CollectParams(collect=SYSTEM)
        return [self.half._planner.chunk([*prompts.system, *chunk], asked) for chunk in prompts.chunks]

    def set_pool(self, nbytes: int) -> None:
        """Change the pool's budget as a client does."""
        transfer = {"cacheblend": {"version": 1, "budgets": {"gpu": nbytes}}}
        (output,) = self.llm.generate([{"prompt_token_ids": [1000] * 8}], sampling(transfer, 2), use_tqdm=False)
        assert output.kv_transfer_params["cacheblend"]["budgets"]["gpu"] == nbytes

    def step_until(self, done: Callable[[], bool], what: str) -> None:
        """Have the engine make steps until it is done."""
        for _ in range(100):
            if done():
                return
            self.llm.generate([{"prompt_token_ids": [1000] * 8}], sampling(None, 4), use_tqdm=False)
        raise SystemExit(f"after 100 requests still not: {what}")

    def empty_pool(self) -> None:
        self.set_pool(0)
        self.step_until(
            lambda: (
                not (self.store.bytes_used(Tier.GPU) or self.scheduler.used_bytes(Tier.GPU))
                and not (self.traffic.in_flight() or self.prefetcher.in_flight())
            ),
            "an empty pool",
        )

    def make_resident(self, prompts: Prompts) -> None:
        self.set_pool(self.pool_bytes)
        chunks = self.identities(prompts)
        for _ in range(20):
            if all(self.store.lookup(chunk) is Tier.GPU for chunk in chunks) and not self.traffic.in_flight():
                return
            first_token(self.llm, prompts, {"selector": "none"})
            self.step_until(lambda: not self.traffic.in_flight(), "arrived")
        raise SystemExit("the chunks do not come to the GPU")


class CopyWatch:
    """Puts events around the staged copies, and around the model's waits for what they bring, while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.copies: list[tuple[Any, Any]] = []
        self.waits: list[tuple[Any, Any]] = []
        copy_layers, ensure_layer = LayerCopies.start, StagedPlacement.ensure

        def start(copies: Any, *what: int) -> None:
            begin = mark(copies._stream) if self.on else None
            copy_layers(copies, *what)
            if begin is not None:
                self.copies.append((begin, mark(copies._stream)))

        def ensure(placement: Any, layer: int) -> None:
            if self.on:
                placement._placed = [_Placed.of(placed, self) for placed in placement._placed]
            ensure_layer(placement, layer)

        LayerCopies.start = start  # type: ignore[method-assign]
        StagedPlacement.ensure = ensure  # type: ignore[method-assign]

    def take(self) -> dict[str, float]:
        """Milliseconds of copies, and of the model's stream waiting for them, since the last time."""
        torch.cuda.synchronize()
        totals = {
            name: sum(begin.elapsed_time(end) for begin, end in pairs)
            for name, pairs in (("copy_ms", self.copies), ("exposed_ms", self.waits))
        }
        self.copies.clear()
        self.waits.clear()
        return totals


class _Placed:
    """The event that a group of layers is in the pages, and how long the model's stream waits for it."""

    def __init__(self, event: Any, watch: CopyWatch) -> None:
        self._event, self._watch = event, watch

    @classmethod
    def of(cls, event: Any, watch: CopyWatch) -> _Placed:
        return event if isinstance(event, cls) else cls(event, watch)

    def record(self) -> None:
        self._event.record()

    def wait(self, stream: Any = None) -> None:
        if stream is not None:
            # The one that copies waits for room.
            self._event.wait(stream)
            return
        begin = mark()
        self._event.wait()
        self._watch.waits.append((begin, mark()))


def plain_gb_s(bench: Bench, chunks: Sequence[Any]) -> float:
    """GB/s of whole chunks copied one behind another, all on the host."""
    sources = [bench.store.get(chunk).kv for chunk in chunks]
    into, stream = torch.empty_like(sources[0], device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.stream(stream):
        begin = mark(stream)
        for kv in sources:
            into.copy_(kv, non_blocking=True)
        end = mark(stream)
    end.synchronize()
    return sum(kv.nbytes for kv in sources) / begin.elapsed_time(end) / 1e6
