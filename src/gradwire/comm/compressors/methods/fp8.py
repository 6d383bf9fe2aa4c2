"""8-bit floats with one scale per block of consecutive elements: e4m3 (4 significant bits) or e5m2 (3, wider range).

The formats are those of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433, 2022): e4m3 without
infinities, largest value 448, smallest step 2^-9; e5m2 as in IEEE 754, largest value 57,344, smallest step 2^-16.

Wire, for n elements in row-major order and b = ceil(n / block) blocks: b scales as float32, then n codes, a byte each:
sign, exponent, mantissa from the highest bit down. Element i decodes to ``value(code[i]) * scale[i // block]``;
``scale = max|x| / top`` over its block, where top is the format's largest value, and ``x / scale`` is rounded to
nearest, ties to even. Float32 may round ``x / scale`` just above top, which still rounds to top: a finite block has
finite codes. A block with a non-finite value has a non-finite scale and decodes to NaN.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Block, BlockQuantizer, Shape, as_numbers, numel


class FP8(BlockQuantizer):
    """Sends a byte per element and a float32 scale per block.

    An element's error is at most 1/17 of its magnitude (e4m3; 1/9 for e5m2) where ``x / scale`` is a normal number of
    the format, from 2^-6 (2^-14) on, and at most half the format's smallest step times the scale below; float32's own
    rounding comes on top.
    """

    name = "fp8"
    use = "A quarter of the bytes where values within a block differ by orders of magnitude."

    format: Literal["e4m3", "e5m2"] = Field(default="e4m3", description="more precision (e4m3) or more range (e5m2)")
    block: Block = Field(default=256, description="consecutive elements that share one scale")

    @property
    def dtype(self) -> torch.dtype:
        """torch's name for the format."""
        return torch.float8_e4m3fn if self.format == "e4m3" else torch.float8_e5m2

    @property
    def top(self) -> float:
        """The format's largest finite value."""
        return torch.finfo(self.dtype).max

    def wire_bytes(self, shape: Shape) -> int:
        """A byte per element and four per block."""
        return 4 * self.blocks(shape) + numel(shape)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Scale each block to ``top`` and cast."""
        scales = self.scales(x, self.top)
        codes = self.divided(x, scales).to(self.dtype)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply each value by its block's scale."""
        scales, codes = wire.split([4 * self.blocks(shape), numel(shape)])
        return self.multiplied(codes.view(self.dtype), as_numbers(scales, torch.float32))
