"""Small data sets in MuSiQue's shape, and loaders for them, for MuSiQue's own files and for CacheBlend's."""

from inputs.errors import DatasetError
from inputs.examples import Context, Example, distinct_contexts
from inputs.loading import (
    INVENTED_PATH,
    load_dataset,
    load_examples,
    load_invented,
    load_invented_dataset,
)

__all__ = [
    "INVENTED_PATH",
    "Context",
    "DatasetError",
    "Example",
    "distinct_contexts",
    "load_dataset",
    "load_examples",
    "load_invented",
    "load_invented_dataset",
]
