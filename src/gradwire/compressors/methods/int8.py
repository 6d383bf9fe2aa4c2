"""8-bit integers with one scale per block of consecutive elements (linear, symmetric; range -127 to 127).

Block-wise absolute-maximum scaling as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022),
with linear codes; stochastic rounding as in Alistarh et al., "QSGD" (NeurIPS 2017).

Wire, for n elements in row-major order and b = ceil(n / block) blocks: b scales as float32, then n codes as int8.
Element i decodes to ``code[i] * scale[i // block]``, and ``scale = max|x| / 127`` over its block.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from gradwire.compressors.base import Compressor, Shape, as_numbers, numel

LEVELS = 127  # codes on either side of zero
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # keeps the division exact for denormal blocks, and zeros at zero


class Int8(Compressor):
    """Sends an 8-bit code per element and a float32 scale per block.

    With ``nearest`` an element's error is at most half its block's scale (and float32's own rounding). With
    ``stochastic`` it is less than the scale, its expectation is zero and its variance is ``scale^2 f (1 - f)``, where f
    is the fractional part of ``x / scale``.
    """

    name = "int8"

    block: int = Field(256, ge=1, description="consecutive elements that share one scale")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="how a value becomes an integer")

    @property
    def unbiased(self) -> bool:
        """Only stochastic rounding is unbiased."""
        return self.rounding == "stochastic"

    def blocks(self, shape: Shape) -> int:
        """Number of blocks, the last one perhaps shorter."""
        return -(-numel(shape) // self.block)

    def wire_bytes(self, shape: Shape) -> int:
        """One byte per element and four per block."""
        return 4 * self.blocks(shape) + numel(shape)

    def in_blocks(self, values: Tensor) -> Tensor:
        """A vector as the rows of a matrix, one row per block, zeros at the end."""
        return pad(values, (0, -values.numel() % self.block)).view(-1, self.block)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Scale each block to 127 and round."""
        blocks = self.in_blocks(x.view(-1))
        scales = (blocks.abs().amax(dim=1) / LEVELS).clamp_min_(SMALLEST_SCALE)
        levels = blocks / scales.unsqueeze(1)
        if self.rounding == "nearest":
            levels.round_()
        else:
            levels.add_(draw_like(levels, generator)).floor_().clamp_(-LEVELS, LEVELS)
        codes = levels.to(torch.int8).view(-1)[: x.numel()]
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply each code by its block's scale."""
        scales, codes = wire.split([4 * self.blocks(shape), numel(shape)])
        levels = self.in_blocks(codes.view(torch.int8)).to(torch.float32)
        return levels.mul_(as_numbers(scales, torch.float32).unsqueeze(1)).view(-1)[: codes.numel()]


def draw_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers in [0, 1), as many as ``x`` has.

    Raises:
        ValueError: Without a generator: the global random state is not ours to use.
    """
    if generator is None:
        raise ValueError("int8 with stochastic rounding needs a generator")
    return torch.rand(x.shape, generator=generator, device=x.device)
