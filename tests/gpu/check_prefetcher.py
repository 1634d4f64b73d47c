"""Checks transfers between host memory and the GPU pool on a CUDA device, and measures them beside plain copies.

    python3 tests/gpu/check_prefetcher.py --out FILE.json [--rounds 7] [--chunks 40] [--commit HASH]

Checked: what is being copied is not shown and never read half-way (its room holds NaN until the copy's event), room is
not reused under queued readers, a cancelled copy gives its room back, copies go on though nobody calls, a failed
page-lock leaves CUDA without an error, and no call waits for the device. Measured:
swapping that never stops, four times the pool in each round, beside plain copies of the same bytes in the same run.
Prints one JSON line a result; ends with 1 if a check failed or swapping is below 80 % of plain copies.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from kvstore.chunk import ChunkKV  # noqa: E402
from kvstore.copy_lane import CudaLane  # noqa: E402
from kvstore.cuda_runtime import clear_last_error  # noqa: E402
from kvstore.cuda_transfer import CudaPrefetcher  # noqa: E402
from kvstore.errors import UnavailableReason  # noqa: E402
from kvstore.gpu import GpuPool  # noqa: E402
from kvstore.key import ChunkIdentity  # noqa: E402
from kvstore.store import ChunkStore  # noqa: E402
from kvstore.tiers import Tier  # noqa: E402
from kvstore.transfer import TransferOrder  # noqa: E402

DEVICE = torch.device("cuda")
LAYERS, TOKENS, HEADS, DIM = 32, 650, 8, 128
"""A chunk of MuSiQue's usual length in an 8B model: 85 MB in bf16."""
ONE = LAYERS * 2 * TOKENS * HEADS * DIM * 2
LONG = 400_000_000
"""Device cycles: about 0.2 s."""
BAR = 0.8
STEP_S = 0.005


def identity_of(number: int) -> ChunkIdentity:
    return ChunkIdentity("0123456789abcdef0123456789abcdef", (1,), tuple(range(number, number + TOKENS)))


def open_store(chunks: int, pool_chunks: int) -> tuple[ChunkStore, list[ChunkIdentity]]:
    """A store in memory with that many chunks on the host, page-locked, each filled with a number of its own."""
    store = ChunkStore(None, chunks * ONE, pinned=True, gpu=GpuPool(pool_chunks * ONE, DEVICE))
    identities = [identity_of(number) for number in range(chunks)]
    for number, identity in enumerate(identities):
        kv = torch.full((LAYERS, 2, TOKENS, HEADS, DIM), float(number + 1), dtype=torch.bfloat16)
        report = store.put(ChunkKV(identity, kv))
        assert report.on_host, report
    return store, identities


def to_gpu(*identities: ChunkIdentity) -> list[TransferOrder]:
    return [TransferOrder(identity, Tier.GPU) for identity in identities]


class PoisonedLane(CudaLane):
    """Every copy stands behind a long kernel, and its destination holds NaN until it is copied."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            destination.fill_(torch.nan)
            torch.cuda._sleep(LONG)
        super().copy(destination, source)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, what makes this thread wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def is_all(kv: torch.Tensor, number: int) -> bool:
    """Whether every value, read by kernels on this thread's stream, is what the chunk was filled with."""
    return bool((kv == float(number + 1)).all())


def check_nothing_is_read_before_its_event() -> dict[str, Any]:
    store, identities = open_store(3, 3)
    prefetcher = CudaPrefetcher(store, lane=PoisonedLane(DEVICE))
    looks, arrived, right = 0, 0, True
    # Begun in inference mode and ended outside of it, as calls of an engine may come.
    with waiting_is_an_error(), torch.inference_mode():
        prefetcher.start(to_gpu(*identities))
    while arrived < len(identities):
        with waiting_is_an_error():
            shown = {result.key for result in prefetcher.poll()}
        arrived += len(shown)
        looks += 1
        for number, identity in enumerate(identities):
            on_gpu = store.lookup(identity) is Tier.GPU
            chunk = store.get(identity)
            right &= chunk.kv.is_cuda == on_gpu
            if identity.key in shown:
                right &= on_gpu and is_all(chunk.kv, number)
        time.sleep(0.001)
    prefetcher.close()
    return {"ok": right and looks > 10 and store.pinned_count() == 0, "looks_while_copying": looks}


def check_room_is_not_reused_under_a_reader() -> dict[str, Any]:
    """A reader queued behind a long kernel sees its chunk, though it was evicted and another waits for its room."""
    store, (first, second) = open_store(2, 1)
    prefetcher = CudaPrefetcher(store)
    prefetcher.start(to_gpu(first))
    prefetcher.wait([first.key], None, target=Tier.GPU)
    prefetcher.poll()
    reader = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(reader):
        torch.cuda._sleep(LONG)
        copied = store.get(first).kv.clone()
        read = torch.cuda.Event()
        read.record(reader)
        store.evict(first.key, Tier.GPU)
    prefetcher.start(to_gpu(second))
    looks, results, too_early = 0, [], False
    while not results:
        with waiting_is_an_error():
            # In this order: what was issued before the read was over was issued too early.
            issued = prefetcher.bytes_issued
            too_early |= issued > 0 and not read.query()
            results = prefetcher.poll()
        looks += 1
        time.sleep(0.001)
    right = results[0].ok and is_all(copied, 0) and is_all(store.get(second).kv, 1)
    prefetcher.close()
    return {"ok": right and not too_early and looks > 10, "looks_while_waiting": looks}


def check_copies_go_on_though_nobody_calls() -> dict[str, Any]:
    """While the caller is away, more than `BYTES_AHEAD` is copied; while paused, nothing is."""
    store, identities = open_store(8, 8)
    prefetcher = CudaPrefetcher(store)
    prefetcher.pause()
    prefetcher.start(to_gpu(*identities))
    time.sleep(0.05)
    paused = prefetcher.bytes_issued == 0 and store.bytes_used(Tier.GPU) == 0
    prefetcher.resume()
    time.sleep(0.5)
    arrived = sum(store.lookup(identity) is Tier.GPU for identity in identities)
    right = all(is_all(store.get(identity).kv, number) for number, identity in enumerate(identities))
    prefetcher.close()
    return {"ok": paused and right and arrived == len(identities), "arrived": arrived}


def check_a_failed_lock_leaves_no_error_behind() -> dict[str, Any]:
    """Memory that is page-locked already is refused, and the next kernel launch does not raise for it."""
    runtime, memory = torch.cuda.cudart(), torch.empty(1 << 20, dtype=torch.uint8)
    assert runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == runtime.cudaError.success

    def launch_raises() -> bool:
        try:
            torch.zeros(8, device=DEVICE).add_(1)
        except RuntimeError:
            return True
        return False

    failed = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) != runtime.cudaError.success
    raised_uncleared = launch_raises()
    runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    clear_last_error()
    raised = launch_raises()
    runtime.cudaHostUnregister(memory.data_ptr())
    return {"ok": failed and not raised, "raised_when_not_cleared": raised_uncleared}


def check_a_cancelled_copy_gives_its_room_back() -> dict[str, Any]:
    store, (first, second) = open_store(2, 1)
    assert store.gpu is not None
    prefetcher = CudaPrefetcher(store, bytes_ahead=1, lane=PoisonedLane(DEVICE))
    with waiting_is_an_error():
        prefetcher.start(to_gpu(first))
        called_off = prefetcher.cancel(first.key, target=Tier.GPU)
        kept = store.gpu.bytes_used == ONE and not prefetcher.poll()
    began = time.perf_counter()
    result = prefetcher.wait([first.key], None, target=Tier.GPU)[first.key]
    seconds = time.perf_counter() - began
    empty = store.gpu.bytes_used == 0 and store.pinned_count() == 0
    prefetcher.start(to_gpu(second))
    prefetcher.wait([second.key], None, target=Tier.GPU)
    right = store.lookup(first) is Tier.HOST and is_all(store.get(second).kv, 1)
    prefetcher.close()
    ok = called_off and kept and result.reason is UnavailableReason.CANCELLED and empty and right
    return {"ok": ok, "seconds_until_its_room_was_back": seconds}


class Stopwatch:
    """Seconds spent inside calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = call(*arguments)
        self.seconds += time.perf_counter() - began
        return result


def swap(store: ChunkStore, prefetcher: CudaPrefetcher, order: list[ChunkIdentity], pause_s: float) -> dict[str, float]:
    """Bring the chunks to the pool one after another, the longest there leaving for the next: seconds and CPU time."""
    assert store.gpu is not None
    room = store.gpu.budget_bytes // ONE
    there: deque[Any] = deque(identity.key for identity in order if store.lookup(identity) is Tier.GPU)
    to_come = deque(identity for identity in order if identity.key not in there)
    watch, flying, moved = Stopwatch(), 0, 0
    began = time.perf_counter()
    while to_come or flying:
        while to_come and flying < room - 2:
            if flying + len(there) == room:
                store.evict(there.popleft(), Tier.GPU)
            watch.time(prefetcher.start, to_gpu(to_come.popleft()))
            flying += 1
        for result in watch.time(prefetcher.poll):
            assert result.ok, result
            flying -= 1
            there.append(result.key)
            moved += result.nbytes
        time.sleep(pause_s)
    seconds = time.perf_counter() - began
    chunks = moved / ONE
    return {"gb_s": moved / seconds / 1e9, "cpu_us_per_chunk": watch.seconds / chunks * 1e6, "chunks": chunks}


def plain(store: ChunkStore, order: list[ChunkIdentity], into: torch.Tensor) -> float:
    """GB/s of whole page-locked chunks copied one behind another."""
    stream = torch.cuda.Stream(DEVICE)
    sources = [store.get(identity).kv for identity in order]
    sources = [kv for kv in sources if not kv.is_cuda]
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.cuda.stream(stream):
        for kv in sources:
            into.copy_(kv, non_blocking=True)
    stream.synchronize()
    return len(sources) * ONE / (time.perf_counter() - began) / 1e9


def measure(chunks: int, rounds: int) -> dict[str, Any]:
    store, identities = open_store(chunks, chunks // 4)
    prefetcher = CudaPrefetcher(store)
    into = torch.empty((LAYERS, 2, TOKENS, HEADS, DIM), dtype=torch.bfloat16, device=DEVICE)
    drawn = random.Random(0)
    arms: dict[str, list[Any]] = {"plain": [], "swap": [], "swap_polled_each_step": []}
    for number in range(rounds + 1):
        names = list(arms)
        drawn.shuffle(names)
        for name in names:
            order = drawn.sample(identities, chunks)
            if name == "plain":
                found: Any = plain(store, order, into)
            else:
                found = swap(store, prefetcher, order, 0.0 if name == "swap" else STEP_S)
            if number:  # the first round warms up
                arms[name].append(found)
    prefetcher.close()
    plain_gb_s = statistics.median(arms["plain"])
    measured: dict[str, Any] = {"plain_gb_s": plain_gb_s, "plain_gb_s_all": arms["plain"]}
    for name in ("swap", "swap_polled_each_step"):
        gb_s = statistics.median(found["gb_s"] for found in arms[name])
        measured[name] = {
            "gb_s": gb_s,
            "share_of_plain": gb_s / plain_gb_s,
            "cpu_us_per_chunk_of_start_and_poll": statistics.median(found["cpu_us_per_chunk"] for found in arms[name]),
            "rounds": arms[name],
        }
    measured["ok"] = measured["swap"]["share_of_plain"] >= BAR
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for check in (
        check_nothing_is_read_before_its_event,
        check_room_is_not_reused_under_a_reader,
        check_copies_go_on_though_nobody_calls,
        check_a_failed_lock_leaves_no_error_behind,
        check_a_cancelled_copy_gives_its_room_back,
    ):
        results[check.__name__] = check()
        print(json.dumps({check.__name__: results[check.__name__]}), flush=True)
    results["swapping"] = measure(args.chunks, args.rounds)
    print(json.dumps({"swapping": results["swapping"]}), flush=True)
    account = {
        "what": "transfers from page-locked host memory to the GPU pool",
        "device": torch.cuda.get_device_name(DEVICE),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "commit": args.commit,
        "seed": 0,
        "arguments": {"rounds": args.rounds, "chunks": args.chunks},
        "chunk_bytes": ONE,
        "results": results,
    }
    args.out.write_text(json.dumps(account, indent=1) + "\n")
    sys.exit(0 if all(result["ok"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
