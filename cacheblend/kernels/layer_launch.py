"""Launching a Triton kernel once a layer without looking for its binary each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Form = tuple[tuple[object, ...], ...]


def form_of(*tensors: torch.Tensor) -> Form:
    """All that a launch depends on but for the addresses: tensors of equal form can take one another's place.

    Triton compiles for the dtype, and for whether the address is a multiple of 16; shape and strides are what the
    launchers here work out the other arguments from.
    """
    return tuple((t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in tensors)


class LayerLaunch:
    """A kernel that is launched for one layer after another, where only some tensors change, and never their form.

    Triton's ordinary launch looks at every argument to find the binary that fits, which takes several times as long as
    the launch itself. Here the first layer is launched that way, and the others with the binary that it found.

    Args:
        kernel: a `triton.jit` function.
        grid: its programs.
        fixed: its arguments behind the tensors that change, in its own order, `constexpr` ones included.
        options: `num_warps` and what else the compiler takes.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], *fixed: Any, **options: Any) -> None:
        self._kernel = kernel
        self._grid = grid
        self._fixed = fixed
        self._options = options
        self._again: Callable[..., None] | None = None

    def __call__(self, *changing: torch.Tensor) -> None:
        """Launch on the current stream.

        Args:
            changing: the kernel's first arguments; on every call of the form (`form_of`) that they had on the first.
        """
        if self._again is not None:
            self._again(*changing, *self._fixed)
            return
        found = self._kernel[self._grid](*changing, *self._fixed, **self._options)
        # Triton's interpreter compiles nothing that could be kept.
        if found is not None:
            self._again = found[self._grid]
