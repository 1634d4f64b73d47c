"""Launching a Triton kernel without looking for its binary each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Form = tuple[tuple[object, ...], ...]

_binaries: dict[tuple[object, ...], Any] = {}
"""What Triton found, by all that it looks at."""


def form_of(*tensors: torch.Tensor) -> Form:
    """All that a launch depends on but for the addresses: tensors of equal form can take one another's place.

    Triton compiles for the dtype, and for whether the address is a multiple of 16; shape and strides are what the
    launchers here work out the other arguments from.
    """
    return tuple((t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in tensors)


class LayerLaunch:
    """A kernel that is launched for one layer after another, where only its first arguments change, never their form.

    Triton's ordinary launch looks at every argument to find the binary that fits, which takes several times as long as
    the launch itself. Here only the first of its kind in the process is launched that way, and all others with the
    binary that it found; a layer's kind is looked at once for all layers of these.

    Args:
        kernel: a `triton.jit` function.
        grid: its programs.
        fixed: its arguments behind those that change, in its own order, `constexpr` ones included.
        options: `num_warps` and what else the compiler takes.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], *fixed: Any, **options: Any) -> None:
        self._kernel = kernel
        self._grid = grid
        self._fixed = fixed
        self._options = options
        self._again: Callable[..., None] | None = None

    def __call__(self, tensor: torch.Tensor, *changing: torch.Tensor | int) -> None:
        """Launch on the current stream.

        Args:
            tensor: the kernel's first argument; on every call of the form (`form_of`) that it had on the first.
            changing: those that follow: tensors as the first, and numbers that the kernel is not specialised to.
        """
        if self._again is None:
            kind = self._kind(tensor, changing)
            if kind not in _binaries:
                found = self._kernel[self._grid](tensor, *changing, *self._fixed, **self._options)
                # Triton's interpreter compiles nothing that could be kept.
                if found is not None:
                    _binaries[kind] = found
                return
            self._again = _binaries[kind][self._grid]
        self._again(tensor, *changing, *self._fixed)

    def _kind(self, tensor: torch.Tensor, changing: tuple[torch.Tensor | int, ...]) -> tuple[object, ...]:
        """All that Triton compiles for."""
        arguments = (tensor, *changing, *self._fixed)
        parameters = getattr(self._kernel, "params", ())
        kinds = (
            value if parameter.is_constexpr else _kind_of(value, parameter.do_not_specialize)
            for parameter, value in zip(parameters, arguments, strict=False)
        )
        return (self._kernel, tensor.device, *self._options.items(), *kinds)


def _kind_of(value: Any, only_its_type: bool) -> object:
    """What a binary depends on of an argument: its type and, in numbers and addresses, the divisors that are noted."""
    if isinstance(value, torch.Tensor):
        return value.dtype, only_its_type or value.data_ptr() % 16 == 0
    if isinstance(value, int):
        divisors = None if only_its_type else (value == 1, value % 16 == 0)
        return divisors, value.bit_length() > 31
    return type(value)
