"""KV-cache blending: plans, selectors, relocation, runners, scheduling. Importing this loads no torch."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "BlendEngine": "cacheblend.engine",
    "BlendError": "cacheblend.errors",
    "BlendPlan": "cacheblend.plan",
    "Policy": "cacheblend.plan",
    "ReferenceRunner": "cacheblend.reference.runner",
    "SamplingParams": "cacheblend.sampling_params",
    "Segment": "cacheblend.plan",
    "SegmentRole": "cacheblend.plan",
    "UnsupportedModelError": "cacheblend.errors",
    "make_selector": "cacheblend.selectors",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'cacheblend' has no attribute '{name}'")
    return getattr(import_module(_EXPORTS[name]), name)
