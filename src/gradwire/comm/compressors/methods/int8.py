"""Small integers with one scale per block of consecutive elements (linear, symmetric): 8, 4 or 2 bits.

Block-wise absolute-maximum scaling as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022),
with linear codes; stochastic rounding as in Alistarh et al., "QSGD" (NeurIPS 2017).

Wire, for n elements in row-major order and b = ceil(n / block) blocks: b scales as float32, then n codes as two's
complement, packed (`gradwire.comm.compressors.packing`). Element i decodes to ``code[i] * scale[i // block]``;
``scale = max|x| / top`` over its block, where top is 127, 7 or 1.

Rounds: the maximum of |x| over all ranks gives one scale for the whole tensor, and the ranks' codes are summed as int8.
Each rank's codes stay within ``127 // W``, so the sum cannot overflow.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire.base.errors import BadInput
from gradwire.comm.compressors.base import SMALLEST_SCALE, Block, BlockQuantizer, Shape, as_numbers, numel, quotient
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State


class Int8(BlockQuantizer):
    """Sends a code of 8, 4 or 2 bits per element and a float32 scale per block.

    With ``nearest`` an element's error is at most half its block's scale (and float32's own rounding). With
    ``stochastic`` it is less than the scale, its expectation is zero and its variance is ``scale^2 f (1 - f)``, where f
    is the fractional part of ``x / scale``.
    """

    name = "int8"
    use = "A quarter of the bytes or an eighth (`num_bits: 4`), safe without error feedback."

    num_bits: Literal[8, 4, 2] = Field(default=8, description="bits of a code")
    block: Block = Field(default=256, description="consecutive elements that share one scale")
    rounding: Literal["nearest", "stochastic"] = Field(default="nearest", description="how a value becomes an integer")

    @property
    def unbiased(self) -> bool:
        """Only stochastic rounding is unbiased."""
        return self.rounding == "stochastic"

    @property
    def has_rounds(self) -> bool:
        """Codes of 8 bits, rounded to nearest, can be summed by a collective."""
        return self.num_bits == 8 and self.rounding == "nearest"

    @property
    def top(self) -> int:
        """The largest code."""
        return 2 ** (self.num_bits - 1) - 1

    def wire_bytes(self, shape: Shape) -> int:
        """``num_bits`` per element and four bytes per block."""
        return 4 * self.blocks(shape) + packed_bytes(numel(shape), self.num_bits)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Scale each block to ``top`` and round."""
        scales = self.scales(x, self.top)
        levels = self.divided(x, scales)
        codes = levels.round() if self.rounding == "nearest" else self.rounded(levels, self.top, generator)
        fields = codes.to(torch.int8).view(torch.uint8) & (2**self.num_bits - 1)
        return torch.cat([scales.view(torch.uint8), pack(fields, self.num_bits)])

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply each code by its block's scale."""
        scales, packed = wire.split([4 * self.blocks(shape), packed_bytes(numel(shape), self.num_bits)])
        sign = 2 ** (self.num_bits - 1)
        codes = (unpack(packed, self.num_bits, numel(shape)) ^ sign).to(torch.float32) - sign
        return self.multiplied(codes, as_numbers(scales, torch.float32))

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """One scale for all ranks, then a sum of codes that stay within ``127 // W``."""
        top = 127 // context.world
        if not top:
            raise BadInput(f"int8 sums the codes of at most 127 ranks, not of {context.world}; use the exchange.")
        largest = yield ReduceRequest("max", torch.cat([x.view(-1).abs(), x.new_zeros(1)]).amax().view(1))
        scale = quotient(largest, top).clamp_min(SMALLEST_SCALE)
        codes = (x / scale).round_().clamp_(-top, top).to(torch.int8)
        total = yield ReduceRequest("sum", codes, rows=True)
        return total.to(torch.float32) * scale / context.world, codes.to(torch.float32) * scale

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """The maximum, and a byte per element."""
        return RoundCost(summed=4, rows=numel(shape))
