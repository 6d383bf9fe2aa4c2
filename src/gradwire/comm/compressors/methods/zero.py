"""Sends nothing and decodes to 0: a control that shows whether a measure of quality can fail.

Wire: empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.compressors.base import Compressor, Shape, numel


class Zero(Compressor):
    """Sends nothing."""

    name = "zero"
    use = "A negative control: training must get worse with it, or quality is not being measured."

    def wire_bytes(self, shape: Shape) -> int:
        """Zero bytes."""
        return 0

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """No bytes."""
        return torch.empty(0, dtype=torch.uint8, device=x.device)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Zeros."""
        return torch.zeros(numel(shape), dtype=torch.float32, device=wire.device)
