"""Three values per block: minus its scale, zero, plus its scale (TernGrad).

Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning"
(NeurIPS 2017): ``s * sgn(x) * b`` with ``s = max|x|`` and b drawn, 1 with probability ``|x| / s``. The paper takes one
scale per layer; here a block of consecutive elements has one, which is closer to most of its elements (a block as large
as the largest tensor is the paper's). Its gradient clipping, which makes it biased, is left out.

Wire, for n elements in row-major order and b = ceil(n / block) blocks: b scales as float32, then n ternary digits
as two's complement of 2 bits, packed (`gradwire.comm.compressors.packing`). The code of -2 is invalid and never sent.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Block, BlockQuantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack
from gradwire.comm.compressors.philox import draw_seed, uniforms


class TernGrad(BlockQuantizer):
    """Sends a ternary digit per element and a float32 scale per block; unbiased.

    An element's variance is ``|x| (s - |x|)``, that of a block ``s |x|_1 - |x|_2^2``, where s is its scale.
    """

    name = "terngrad"
    use = "Unbiased at about two bits per element, where its large variance averages out over many ranks."

    block: Block = Field(default=256, description="consecutive elements that share one scale")

    @property
    def unbiased(self) -> bool:
        """True."""
        return True

    def wire_bytes(self, shape: Shape) -> int:
        """Four bytes per block and 2 bits per element."""
        return 4 * self.blocks(shape) + packed_bytes(numel(shape), 2)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep each element's sign with probability |x| / s."""
        scales = self.scales(x, 1.0)
        levels = self.divided(x, scales)
        drawn = uniforms(draw_seed(generator, x.device, self.name), x.numel()) < levels.abs()
        digits = (drawn * levels.sign()).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), pack(digits.view(torch.uint8) & 3, 2)])

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply each digit by its block's scale."""
        scales, packed = wire.split([4 * self.blocks(shape), packed_bytes(numel(shape), 2)])
        digits = (unpack(packed, 2, numel(shape)) ^ 2).to(torch.float32) - 2
        return self.multiplied(digits, as_numbers(scales, torch.float32))
