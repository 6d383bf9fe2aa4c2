"""IEEE 754 half precision: 11 significant bits, largest finite value 65,504.

Micikevicius et al., "Mixed Precision Training" (ICLR 2018). Its loss scaling keeps small gradients in its range.

Wire: float16 [n], each rounded to nearest, ties to even. From 65,520 on a value rounds to infinity: that counts as a
non-finite gradient, as NaN and infinity themselves do.

Rounds: a sum in float16 of the values divided by 2^k before the cast, the smallest power of two that is at least
sqrt(W). Dividing by W would keep the sum of any W values in range, but cost log2(W) bits of every value below 2^-14,
where gradients are, silently; without division, W large values overflow. With 2^k, the sum overflows only where the
mean's magnitude exceeds 65,504 * 2^k / W, and the overflow is visible: the sum is infinite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.comm.compressors.base import Quantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State


class FP16(Quantizer):
    """Sends float16."""

    name = "fp16"
    use = "Half the bytes where gradients stay below 65,504; three more bits of precision than bf16."
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

    def elementwise(self, shape: Shape) -> bool:
        """True."""
        return True

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """One sum in float16 of values divided by a power of two."""
        smaller = 2.0 ** math.ceil(math.log2(context.world) / 2)
        sent = (x / smaller).to(torch.float16)
        total = yield ReduceRequest("sum", sent, rows=True, spare=not context.feedback)
        mean = total.to(torch.float32).div_(context.world / smaller)  # smaller is a power of two: exact
        return mean, sent.to(torch.float32).mul_(smaller) if context.feedback else x

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """Two bytes per element."""
        return RoundCost(rows=2 * numel(shape))
