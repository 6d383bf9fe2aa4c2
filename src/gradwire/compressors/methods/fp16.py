"""IEEE 754 half precision: 11 significant bits, largest finite value 65,504.

Wire: float16 [n], each rounded to nearest, ties to even. From 65,520 on a value rounds to infinity: that counts as a
non-finite gradient, as NaN and infinity themselves do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.compressors.base import Quantizer, Shape, as_numbers, numel


class Half(Quantizer):
    """Sends float16."""

    name = "fp16"
    overflow = 65520.0  # half-way between the largest finite value and the next power of two

    def wire_bytes(self, shape: Shape) -> int:
        """Two bytes per element."""
        return 2 * numel(shape)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Cast to float16."""
        return x.view(-1).to(torch.float16).view(torch.uint8)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Cast back to float32, exactly."""
        return as_numbers(wire, torch.float16).to(torch.float32)
