"""Fast kernels for layers that are called outside vLLM's compiled model.

vLLM leaves normalisation to its compiler by default and runs it, uncompiled, as a dozen small operations. Its own
fused kernels are registered beside them; while our layer calls last, these come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from vllm import ir

_OPERATIONS = ("rms_norm", "fused_add_rms_norm")
_FUSED = "vllm_c"


@contextmanager
def eager_kernels(device: torch.device) -> Iterator[None]:
    """Have vLLM's fused kernels serve its normalisation layers, on a GPU; elsewhere nothing changes."""
    with ExitStack() as stack:
        if device.type == "cuda":
            for name in _OPERATIONS:
                operation = getattr(ir.ops, name)
                if _FUSED in operation.impls:
                    stack.enter_context(operation.set_priority([_FUSED, "native"]))
        yield
