"""What it costs to load KV and what it costs to compute it, measured once when a worker starts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cacheblend.scheduling.cost_model import CostModel
from cacheblend.vllm_backend.forward import LayersForward
from cacheblend.vllm_backend.rows import PromptPages, PromptRows, RowBatch
from kvstore.atomic import write_atomically
from kvstore.files import remove_file
from kvstore.tiers import Tier

logger = logging.getLogger(__name__)

PROBE_BYTES = 32 << 20
REPEATS = 3
GPU_ROWS, CPU_ROWS = 512, 32
"""Rows of the prefills that are timed: enough to keep the device busy, few enough for a start."""
READ_AT_A_TIME = 4 << 20


@torch.inference_mode()
def measure_costs(forward: LayersForward, root: Path | None, most_rows: int) -> CostModel:
    """Measure this worker's rates: a few tenths of a second.

    Args:
        forward: runs the model; the block that vLLM keeps unused is read, nothing is written.
        root: folder of the disk tier; None without one. Its rate is that of one reader, what was written dropped from
            memory first.
        most_rows: of a forward pass.
    """
    bytes_per_s = {Tier.HOST: _copy_rate(forward.device)}
    if root is not None and (disk := _read_rate(root)) is not None:
        bytes_per_s[Tier.DISK] = disk
    rows = min(2 * (GPU_ROWS if forward.device.type == "cuda" else CPU_ROWS), most_rows // 2 * 2)
    short, long = (_prefill_seconds(forward, count) for count in (rows // 2, rows))
    # The longer one is twice the shorter: what it takes beyond twice as long is the quadratic share.
    squared = max(0.0, long - 2 * short) / (rows * rows / 4)
    linear = max(long - squared * rows * rows / 2, 1e-9)
    costs = CostModel(bytes_per_s, {}, rows / linear, squared)
    logger.info(
        "cacheblend measured %.0f rows/s of prefill and %s",
        costs.prefill_rows_per_s,
        ", ".join(f"{rate / 1e9:.2f} GB/s from {tier.value}" for tier, rate in bytes_per_s.items()),
    )
    return costs


def _prefill_seconds(forward: LayersForward, rows: int) -> float:
    """Seconds that consecutive rows take in all layers, attending to a page that holds nothing."""
    blocks = torch.zeros(-(-rows // forward.block_size), dtype=torch.int64)
    prompt = PromptPages((0,) * rows, blocks, forward.block_size)
    part = PromptRows(prompt, torch.arange(rows), torch.zeros(rows, dtype=torch.bool))

    def prefill() -> None:
        batch = RowBatch([part], forward.device)
        forward.run(0, forward.num_layers, forward.embed(batch), batch, forward.attention(batch))

    return _least_seconds(prefill, forward.device)


def _copy_rate(device: torch.device) -> float:
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return PROBE_BYTES / _least_seconds(lambda: target.copy_(source, non_blocking=True), device)


def _read_rate(root: Path) -> float | None:
    """Bytes a second of a cold file; None where the folder takes none."""
    path = root / f".calibration.{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(path, os.urandom(1 << 20) * (PROBE_BYTES >> 20))
        try:
            return PROBE_BYTES / _read_seconds(path)
        finally:
            remove_file(path)
    except OSError as error:
        logger.warning("cacheblend cannot measure the disk of %s: %s", root, error)
        return None


def _read_seconds(path: Path) -> float:
    buffer = bytearray(READ_AT_A_TIME)
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        while file.readinto(buffer):
            pass
        return time.perf_counter() - started


def _least_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs, after one that is not timed."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        times.append(time.perf_counter() - started)
    return max(min(times[1:]), 1e-9)
