"""No compression: the control that separates the exchange from the compressor.

Wire: float32 [n]. Rounds: a float32 sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.compressors.base import Quantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State


class Uncompressed(Quantizer):
    """Sends float32 unchanged."""

    name = "none"
    use = "The baseline, and with `algorithm: exchange` the control that shows what the exchange itself costs."

    @property
    def unbiased(self) -> bool:
        """True: the encoding is exact."""
        return True

    def wire_bytes(self, shape: Shape) -> int:
        """Four bytes per element."""
        return 4 * numel(shape)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """The tensor's own memory."""
        return x.view(-1).view(torch.uint8)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The bytes as float32."""
        return as_numbers(wire, torch.float32)

    def elementwise(self, shape: Shape) -> bool:
        """True."""
        return True

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """One sum; this rank's contribution is ``x`` itself."""
        total = yield ReduceRequest("sum", x, rows=True)
        return total / context.world, x

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """Four bytes per element."""
        return RoundCost(rows=4 * numel(shape))
