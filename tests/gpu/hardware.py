"""What the device can do by itself: bandwidths that floors are made of; and what a result file says of its run."""

from __future__ import annotations

import argparse
import platform
import statistics
from typing import Any

import torch
import vllm

COPIED_BYTES = 1 << 30


def link_gb_s() -> float:
    """GB/s of one large copy from page-locked host memory to the device; the median of five."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    return _copy_gb_s(source, torch.empty_like(source, device="cuda"))


def device_gb_s() -> float:
    """GB/s that the device's memory moves, read and written bytes together, in one large copy; the median of five."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    return 2 * _copy_gb_s(source, torch.empty_like(source))


def mark(stream: Any = None) -> Any:
    """An event with a time, recorded now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream or torch.cuda.current_stream())
    return event


def _copy_gb_s(source: torch.Tensor, into: torch.Tensor) -> float:
    rates = []
    for _ in range(6):
        begin = mark()
        into.copy_(source, non_blocking=True)
        end = mark()
        end.synchronize()
        rates.append(source.nbytes / begin.elapsed_time(end) / 1e6)
    return statistics.median(rates[1:])


def described(what: str, args: argparse.Namespace) -> dict[str, Any]:
    """The head of a result file."""
    return {
        "what": what,
        "model": "Llama-3-8B shape, dummy bf16 weights",
        "device": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": args.commit,
        "arguments": {key: str(value) for key, value in vars(args).items() if key != "out"},
    }


def at(values: list[float], share: float) -> float:
    """The value below which such a share of them lies."""
    return sorted(values)[int(share * (len(values) - 1))]
