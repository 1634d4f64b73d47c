"""Time that the chunk scheduler takes of a decode step, with few and with many chunks in its catalogue.

    python -m eval.scheduling --out scheduling.json

Each step tells the scheduler what has moved since the last one and hands it sixteen pieces of advice, the most that an
engine has applied in a step; one step in twenty instead admits a request of ten chunks (the connector lets advice wait
then), whose pins go two steps later, when its blend would have ended. Advice is what changed: in each step eight pieces
are new and the eight of the step before are taken back. Of the new ones, one is about a chunk in no memory and another
one, with much confidence, about a chunk that is not on the GPU: two promotions a step, each with its eviction, are more
than a GPU host can carry out in a decode step of 5 ms. Two are about chunks in memory and four about chunks that nobody
has stored, so that a catalogue of ten chunks has as much to move and to look at as any other one. In the row "all
stored" all pieces are about stored chunks. Four fifths of each catalogue fit into host memory and two fifths onto the
GPU, both full. All catalogues take turns in one run. Garbage collection is on; what it takes between two steps counts
as a step's, too. What there is at start is frozen (`gc.freeze`), as vLLM's engine core does. Times are by the clock,
and of CPU time, which other processes on a busy machine do not add to.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from cacheblend.plan import BlendPlan, Policy, Segment, SegmentRole
from cacheblend.protocols import Advice, Eviction
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.scheduling.cost_model import CostModel
from cacheblend.selectors import make_selector
from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from eval.provenance import REPOSITORY, describe_code, describe_device, package_versions
from kvstore.events import Evicted, Published, StoreEvent
from kvstore.key import ChunkIdentity
from kvstore.tiers import ChunkRecord, Tier
from kvstore.transfer import TransferOrder

CATALOGUES = "10,1000,100000"
STEPS_PER_ADMISSION = 20
STEPS_PINNED = 2
CHUNKS_PER_REQUEST = 10
NEW_IN_MEMORY = 2
NEW_OF_STRANGERS = 4
CHUNK_TOKENS = 16
KV_BYTES_PER_TOKEN = 131_072
CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
ON_HOST_SHARE = 0.8
ON_GPU_SHARE = 0.4
PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}

COSTS = CostModel(
    bytes_per_s={Tier.GPU: 2e12, Tier.HOST: 55e9, Tier.DISK: 12e9},
    latency_s={Tier.HOST: 1e-5, Tier.DISK: 1e-4},
    prefill_rows_per_s=40_000,
)
"""An 8B model on an H200 with a disk so fast that `auto` blends: a request that is prefilled pins and moves nothing."""

app = typer.Typer(add_completion=False)


class Collections:
    """Nanoseconds of CPU time that garbage collections have taken, from `gc.callbacks`."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.count = 0
        self._began = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Called by the collector when it starts and when it stops."""
        if phase == "start":
            self._began = thread_time_ns()
        else:
            self.total_ns += thread_time_ns() - self._began
            self.count += 1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the collections inside the block."""
        gc.callbacks.append(self)
        try:
            yield
        finally:
            gc.callbacks.remove(self)


@dataclass
class Traffic:
    """One catalogue, its scheduler, and what comes and goes.

    Attributes:
        chunks: chunks in the catalogue.
        seed: of what comes and goes.
        all_stored: whether all advice is about stored chunks.
        wall_ns: of each measured step by the clock, collections included.
        cpu_ns: the same of the thread's CPU time.
        moves: promotions, loads and evictions decided in the measured steps.
    """

    chunks: int
    seed: int
    all_stored: bool = False
    wall_ns: list[int] = field(default_factory=list)
    cpu_ns: list[int] = field(default_factory=list)
    moves: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._all = [ChunkIdentity("benchmark", (), (index, *range(CHUNK_TOKENS - 1))) for index in range(self.chunks)]
        self._strangers = [ChunkIdentity("stranger", (), (index, *range(CHUNK_TOKENS - 1))) for index in range(1_000)]
        self._on_host = set(self._random.sample(range(self.chunks), int(self.chunks * ON_HOST_SHARE)))
        self._on_gpu = set(self._random.sample(sorted(self._on_host), int(self.chunks * ON_GPU_SHARE)))
        self._index = {chunk.key: index for index, chunk in enumerate(self._all)}
        self._in = {Tier.HOST: self._on_host, Tier.GPU: self._on_gpu}
        budgets = {tier: len(inside) * CHUNK_BYTES for tier, inside in self._in.items()}
        self._scheduler = ChunkScheduler(budgets, map(self._record, self._all), costs=COSTS)
        self._selector = make_selector("deviation", 0.15)
        self._events: list[StoreEvent] = []
        self._steps = 0
        self._said: list[Advice] = []

    def step(self, collected_ns: Callable[[], int]) -> tuple[int, int]:
        """One decode step's worth of decisions: nanoseconds by the clock and of CPU time, without collections.

        Args:
            collected_ns: what collections have taken so far.
        """
        self._steps += 1
        turn = self._steps % STEPS_PER_ADMISSION
        name = str(self._steps // STEPS_PER_ADMISSION)
        plan = self._plan() if turn == 0 else None
        advice = self._advice() if plan is None else []
        events, scheduler = self._events, self._scheduler
        admission = None
        collected = collected_ns()
        began, began_cpu = perf_counter_ns(), thread_time_ns()
        for event in events:
            scheduler.on_event(event)
        if plan is not None:
            admission = scheduler.admit(name, plan, Policy.AUTO)
        elif turn == STEPS_PINNED:
            scheduler.release(name)
        step = scheduler.step(advice)
        cpu, wall = thread_time_ns() - began_cpu, perf_counter_ns() - began
        collected = collected_ns() - collected
        self._events = self._carry_out(step.evictions, step.promotions)
        if admission is not None:
            self._events += self._carry_out(admission.evictions, (*admission.loads, *admission.promotions))
        self.moves += len(self._events)
        return wall - collected, cpu - collected

    def _record(self, chunk: ChunkIdentity) -> ChunkRecord:
        index = self._index[chunk.key]
        tiers = {tier for tier, inside in self._in.items() if index in inside}
        return ChunkRecord(chunk.key, CHUNK_BYTES, CHUNK_TOKENS, frozenset({Tier.DISK, *tiers}))

    def _plan(self) -> BlendPlan:
        # A request brings its own tokens, and so its own identities.
        chosen = [replace(chunk) for chunk in self._random.sample(self._all, CHUNKS_PER_REQUEST)]
        parts = [Segment(SegmentRole.CHUNK, chunk.token_ids, chunk) for chunk in chosen]
        return BlendPlan((*parts, Segment(SegmentRole.QUESTION, (1, 2, 3))), self._selector)

    def _advice(self) -> list[Advice]:
        """What is new: a piece that concerns the GPU, one that concerns the host, others; then what is taken back."""
        taken_back = self._said
        named = {self._index.get(piece.chunk.key, -1) for piece in taken_back}
        sure, cold = self._one(named, self._is_on_host_alone), self._one(named, self._is_in_no_memory)
        self._said = [Advice(sure, 0.9), Advice(cold, 0.4), *self._others(named)]
        said = {piece.chunk.key for piece in self._said}
        return [*self._said, *(Advice(piece.chunk, 0.0) for piece in taken_back if piece.chunk.key not in said)]

    def _others(self, named: set[int]) -> list[Advice]:
        """Chunks on the GPU, as many in host memory alone, and strangers unless all is to be stored."""
        count = NEW_IN_MEMORY + (NEW_OF_STRANGERS if self.all_stored else 0)
        places = (self._on_gpu.__contains__, self._is_on_host_alone)
        chosen = [self._one(named, fits) for fits in places for _ in range(count // 2)]
        if not self.all_stored:
            # By turns, so that none is new that is taken back.
            begin = self._steps * NEW_OF_STRANGERS % len(self._strangers)
            chosen += self._strangers[begin : begin + NEW_OF_STRANGERS]
        return [Advice(chunk, 0.3) for chunk in chosen]

    def _one(self, named: set[int], fits: Callable[[int], bool]) -> ChunkIdentity:
        """A chunk that fits and is not among those named; any one where few do. It is named now."""
        index = 0
        for _ in range(200):
            index = self._random.randrange(self.chunks)
            if index not in named and fits(index):
                break
        named.add(index)
        return self._all[index]

    def _is_on_host_alone(self, index: int) -> bool:
        return index in self._on_host and index not in self._on_gpu

    def _is_in_no_memory(self, index: int) -> bool:
        return index not in self._on_host and index not in self._on_gpu

    def _carry_out(self, evictions: Sequence[Eviction], orders: Sequence[TransferOrder]) -> list[StoreEvent]:
        events: list[StoreEvent] = []
        for eviction in evictions:
            self._in[eviction.tier].discard(self._index[eviction.key])
            events.append(Evicted(eviction.key, eviction.tier, CHUNK_BYTES))
        for order in orders:
            self._in[order.target].add(self._index[order.chunk.key])
            events.append(Published(order.chunk.key, order.target, CHUNK_BYTES, CHUNK_TOKENS))
        return events


@app.command(help=__doc__)
def scheduling(
    catalogues: Annotated[str, typer.Option(help="chunks in each catalogue, at least ten, by commas")] = CATALOGUES,
    steps: Annotated[int, typer.Option(min=1, help="measured steps of each catalogue")] = 20_000,
    warm_up: Annotated[int, typer.Option(min=0, help="steps of each catalogue before those")] = 2_000,
    seed: Annotated[int, typer.Option(help="of what comes and goes")] = 0,
    out: Annotated[Path | None, typer.Option(help="file for the result as JSON")] = None,
) -> None:
    """Run the benchmark and print microseconds a step."""
    with one_sentence_for_bad_input():
        sizes = _sizes(catalogues)
        result = run(sizes, steps, warm_up, seed)
        _print(result)
        if out is not None:
            account = _provenance({"catalogues": sizes, "steps": steps, "warm_up": warm_up}, seed)
            _write(out, json.dumps({"provenance": account, **result}, indent=2) + "\n")


def run(sizes: Sequence[int], steps: int, warm_up: int, seed: int) -> dict[str, Any]:
    """Measure catalogues of these sizes, taking turns: a JSON-ready result."""
    traffic = [*(Traffic(size, seed) for size in sizes), Traffic(sizes[-1], seed, all_stored=True)]
    collections = Collections()
    gc.collect()
    gc.freeze()
    try:
        with collections.watched():
            for number in range(warm_up + steps):
                for each in traffic:
                    if number == warm_up:
                        each.moves = 0
                    before = collections.total_ns
                    wall, cpu = each.step(lambda: collections.total_ns)
                    if number >= warm_up:
                        # With what was collected while the step was made up and carried out.
                        each.wall_ns.append(wall + collections.total_ns - before)
                        each.cpu_ns.append(cpu + collections.total_ns - before)
    finally:
        gc.unfreeze()
    rows = [_row(each) for each in traffic]
    return {
        "workload": _workload(steps),
        "collections": collections.count,
        "catalogues": rows,
        "p50_ratio_most_to_fewest": round(rows[-2]["us"]["p50"] / rows[0]["us"]["p50"], 3),
        "cpu_p50_ratio_most_to_fewest": round(rows[-2]["cpu_us"]["p50"] / rows[0]["cpu_us"]["p50"], 3),
    }


def _row(traffic: Traffic) -> dict[str, Any]:
    return {
        "chunks": traffic.chunks,
        "all_advice_about_stored": traffic.all_stored,
        "us": _percentiles_us(traffic.wall_ns),
        "cpu_us": _percentiles_us(traffic.cpu_ns),
        "moves_a_step": round(traffic.moves / len(traffic.wall_ns), 2),
    }


def _percentiles_us(nanoseconds: Sequence[int]) -> dict[str, float]:
    microseconds = np.percentile(np.array(nanoseconds) / 1e3, list(PERCENTILES.values()))
    return {name: round(float(value), 1) for name, value in zip(PERCENTILES, microseconds, strict=True)}


def _workload(steps: int) -> dict[str, Any]:
    return {
        "steps_each": steps,
        "steps_per_admission": STEPS_PER_ADMISSION,
        "chunks_per_request": CHUNKS_PER_REQUEST,
        "steps_pinned": STEPS_PINNED,
        "pieces_of_advice_a_step": 2 * (2 + NEW_IN_MEMORY + NEW_OF_STRANGERS),
        "share_on_host": ON_HOST_SHARE,
        "share_on_gpu": ON_GPU_SHARE,
        "eviction_policy": "gdsf",
    }


def _print(result: dict[str, Any]) -> None:
    table = Table("chunks", "time", *(f"{name} us" for name in PERCENTILES), "moves a step")
    for row in result["catalogues"]:
        name = f"{row['chunks']:,}" + (", all stored" if row["all_advice_about_stored"] else "")
        for label, times in (("wall", row["us"]), ("CPU", row["cpu_us"])):
            table.add_row(name, label, *(f"{times[each]:.1f}" for each in PERCENTILES), str(row["moves_a_step"]))
    console = Console()
    console.print(table)
    ratio, of_cpu = result["p50_ratio_most_to_fewest"], result["cpu_p50_ratio_most_to_fewest"]
    console.print(f"p50 with the most chunks over p50 with the fewest: {ratio:.2f}, of CPU time {of_cpu:.2f}")


def _sizes(catalogues: str) -> list[int]:
    try:
        sizes = [int(part) for part in catalogues.split(",")]
    except ValueError as error:
        raise EvalError(f"--catalogues {catalogues} is no list of numbers; give for example {CATALOGUES}.") from error
    if min(sizes) < CHUNKS_PER_REQUEST:
        raise EvalError(f"--catalogues {catalogues} has one of fewer than {CHUNKS_PER_REQUEST} chunks; give more.")
    return sizes


def _provenance(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": describe_device("cpu"),
        "versions": package_versions(),
        "code": describe_code(REPOSITORY),
        "seed": seed,
        "arguments": arguments,
    }


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as error:
        raise EvalError(f"--out {out} cannot be written ({error.strerror}); name a writable file.") from error


if __name__ == "__main__":
    app()
