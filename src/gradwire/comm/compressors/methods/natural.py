"""Each element randomly rounded to a power of two: a sign and an exponent travel (natural compression).

Horváth, Ho, Horváth, Sahu, Canini, Richtárik, "Natural Compression for Distributed Deep Learning" (arXiv:1905.10988):
a magnitude between the powers a and 2a becomes 2a with probability ``(|x| - a) / a``, else a. That is the mantissa as a
fraction: added to a number of as many random bits, it carries over into the exponent with just this probability.

Wire, for n elements in row-major order. 9 bits, the paper's: n bytes of exponents as float32 has them (0 for zero, 1
for 2^-126 and so on), then n signs as bits, packed (`gradwire.comm.compressors.packing`). 8 bits, the default: for each
of b = ceil(n / block) blocks a byte with the lowest exponent that it can send, of the same kind; then n bytes, the sign
in the highest bit, below it 0 for zero, 1 for that lowest exponent and so on. That leaves 127 powers; the highest is
the one that the block's largest magnitude may be rounded up to.

In both forms, an element below the lowest power is rounded to that power or to zero, as denormal numbers are.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Block, BlockQuantizer, Shape, numel
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack
from gradwire.comm.compressors.philox import draw_seed, words

MANTISSA = 23  # bits
SIGNLESS = 0x7FFFFFFF
NOT_FINITE = 255  # the exponent of infinity and NaN
POWERS = 127  # powers with 8 bits
SCALES = [2.0 ** (1 - lowest) for lowest in range(256)]  # of a block, by its lowest exponent


class Natural(BlockQuantizer):
    """Sends sign and exponent of every element; unbiased.

    The variance of an element between the powers a and 2a is ``(|x| - a) (2a - |x|)``: at most ``x^2 / 8``, reached at
    4a / 3; powers of two are exact. An element below the lowest power a has ``|x| (a - |x|)``; its probability
    is exact for 9 bits, and to 2^-24 for 8.
    """

    name = "natural"
    use = "Unbiased at a byte per element, with a variance of at most an eighth of its square."
    overflow = 2.0**127 * (1 + 2.0**-MANTISSA)  # the next number after 2^127 may be rounded up to 2^128

    bits: Literal[8, 9] = Field(default=8, description="bits per element: 7 or 8 of them for the exponent")
    block: Block = Field(default=512, description="consecutive elements that share a lowest exponent, with 8 bits")

    @property
    def unbiased(self) -> bool:
        """True for all options."""
        return True

    def wire_bytes(self, shape: Shape) -> int:
        """A byte per element, and a byte per block or a bit per element."""
        return numel(shape) + (self.blocks(shape) if self.bits == 8 else packed_bytes(numel(shape), 1))

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Round with random bits that carry over; with 8 bits, after scaling a block's lowest power to 2^-126."""
        values = x.view(-1)
        noise = words(draw_seed(generator, x.device, self.name), x.numel()) >> (32 - MANTISSA)
        minus = values.signbit().to(torch.uint8)
        if self.bits == 9:
            return torch.cat([self.exponents(values, noise).to(torch.uint8), pack(minus, 1)])
        blocks = self.in_blocks(values)
        largest = blocks.abs().amax(dim=1).view(torch.int32) >> MANTISSA
        lowest = (largest + 2 - POWERS).clamp_(min=1)
        scaled = blocks * torch.tensor(SCALES, dtype=torch.float32, device=x.device)[lowest].unsqueeze(1)
        codes = self.exponents(scaled.view(-1)[: x.numel()], noise).clamp_(max=POWERS).to(torch.uint8)
        return torch.cat([lowest.to(torch.uint8), minus << 7 | codes])

    @staticmethod
    def exponents(values: Tensor, noise: Tensor) -> Tensor:
        """Exponents of the randomly rounded magnitudes, at most 255: int64 [n]."""
        magnitudes = (values.view(torch.int32) & SIGNLESS).to(torch.int64)
        return (magnitudes + noise >> MANTISSA).clamp_(max=NOT_FINITE)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Assemble float32 values from exponents and signs."""
        n = numel(shape)
        if self.bits == 9:
            exponents, minus = wire[:n], unpack(wire[n:], 1, n)
        else:
            lowest, codes = wire.split([self.blocks(shape), n])
            minus, codes = codes >> 7, codes & POWERS
            raised = self.in_blocks(codes.to(torch.int32)) + (lowest.to(torch.int32) - 1).unsqueeze(1)
            exponents = torch.where(codes > 0, raised.view(-1)[:n].clamp_(0, NOT_FINITE), 0)
        magnitudes = (exponents.to(torch.int32) << MANTISSA).view(torch.float32)
        return torch.where(minus > 0, -magnitudes, magnitudes)
