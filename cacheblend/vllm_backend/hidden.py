"""What passes from one decoder layer to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cacheblend.kernels.host_tables import on_device


@dataclass(frozen=True, eq=False)
class Hidden:
    """Between two layers: hidden states and residual, each [rows, hidden]; no residual before the first layer."""

    states: torch.Tensor
    residual: torch.Tensor | None

    def take(self, index: torch.Tensor | slice) -> Hidden:
        """The rows at `index`."""
        return Hidden(self.states[index], None if self.residual is None else self.residual[index])

    def copy(self) -> Hidden:
        """The same values in tensors that a layer may overwrite."""
        return Hidden(self.states.clone(), None if self.residual is None else self.residual.clone())

    def overwrite(self, hidden: Hidden, index: torch.Tensor | None = None) -> None:
        """Put rows of `hidden`, at most as many as here, in place of the first ones: those at `index`, or all."""
        _overwrite(self.states, hidden.states, index)
        if self.residual is not None and hidden.residual is not None:
            _overwrite(self.residual, hidden.residual, index)

    @staticmethod
    def join(parts: Sequence[Hidden]) -> Hidden:
        """Rows one after another."""
        if len(parts) == 1:
            return parts[0]
        residuals = [part.residual for part in parts if part.residual is not None]
        return Hidden(torch.cat([p.states for p in parts]), torch.cat(residuals) if residuals else None)


@dataclass(frozen=True, eq=False)
class Entering:
    """What enters a layer: some of the rows that left the one before it.

    Attributes:
        hidden: of these rows and others.
        index: [rows] int64 on the host, which of them.
    """

    hidden: Hidden
    index: np.ndarray

    def on(self, device: torch.device) -> Hidden:
        """The rows by themselves."""
        # As indices: what a mask marks would have to be counted on the device, and waited for.
        return self.hidden.take(on_device(torch.from_numpy(self.index), device))


def _overwrite(rows: torch.Tensor, others: torch.Tensor, index: torch.Tensor | None) -> None:
    if index is None:
        rows[: len(others)].copy_(others)
    else:
        torch.index_select(others, 0, index, out=rows[: len(index)])
