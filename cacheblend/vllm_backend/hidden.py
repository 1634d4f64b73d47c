"""What passes from one decoder layer to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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

    def overwrite(self, hidden: Hidden) -> None:
        """Put the rows of `hidden`, at most as many as here, in place of the first ones."""
        count = len(hidden.states)
        self.states[:count].copy_(hidden.states)
        if self.residual is not None and hidden.residual is not None:
            self.residual[:count].copy_(hidden.residual)

    @staticmethod
    def join(parts: Sequence[Hidden]) -> Hidden:
        """Rows one after another."""
        if len(parts) == 1:
            return parts[0]
        residuals = [part.residual for part in parts if part.residual is not None]
        return Hidden(torch.cat([p.states for p in parts]), torch.cat(residuals) if residuals else None)
