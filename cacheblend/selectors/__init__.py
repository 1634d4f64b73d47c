"""Policies that pick the reusable rows to recompute, one a file."""

from cacheblend.selectors.base import Candidates, Evidence, Selector
from cacheblend.selectors.registry import SELECTOR_NAMES, make_selector, selector_params

__all__ = ["SELECTOR_NAMES", "Candidates", "Evidence", "Selector", "make_selector", "selector_params"]
