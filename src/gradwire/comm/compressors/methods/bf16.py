"""bfloat16: float32's range with 8 significant bits.

Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training" (arXiv:1905.12322, 2019).

Wire: bfloat16 [n], each rounded to nearest, ties to even. The few float32 values that round to infinity (from
2^128 - 2^119 on) count as non-finite gradients, as NaN and infinity do.

Rounds: a sum of the rounded values in bfloat16, so each addition also rounds to 8 significant bits; the
division by the number of ranks is in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.compressors.base import Quantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State


class BF16(Quantizer):
    """Sends bfloat16."""

    name = "bf16"
    use = "The first thing to try: half the bytes at no visible cost, and native collectives can sum it."
    overflow = 2.0**128 - 2.0**119  # half-way between the largest finite value and the next power of two

    def wire_bytes(self, shape: Shape) -> int:
        """Two bytes per element."""
        return 2 * numel(shape)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Cast to bfloat16."""
        return x.view(-1).to(torch.bfloat16).view(torch.uint8)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Cast back to float32, exactly."""
        return as_numbers(wire, torch.bfloat16).to(torch.float32)

    def elementwise(self, shape: Shape) -> bool:
        """True."""
        return True

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """One sum in bfloat16."""
        sent = x.to(torch.bfloat16)
        total = yield ReduceRequest("sum", sent, rows=True, spare=not context.feedback)
        return total.to(torch.float32).div_(context.world), sent.to(torch.float32) if context.feedback else x

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """Two bytes per element."""
        return RoundCost(rows=2 * numel(shape))
