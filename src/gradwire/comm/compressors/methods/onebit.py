"""1-bit SGD: a bit per element and two means per block, one of the negative elements and one of the rest.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs" (Interspeech 2014), with a pair of means per block of consecutive elements where the paper has one per column of a
matrix. The paper relies on error feedback (`gradwire.comm.collectives.codec`).

Wire, for n elements in row-major order and b blocks: b pairs of float32, the mean of the elements that are not negative
and the mean of those that are (0 where a side is empty); then n bits, 1 where ``x < 0``, packed
(`gradwire.comm.compressors.packing`).

Means are sums in float64, divided there and rounded once to float32. Within a block the decoded values C are the
orthogonal projection of x onto the values that these bits can represent: C has x's sum, and
``||x - C||^2 = ||x||^2 - ||C||^2``.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Block, BlockQuantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack


class OneBit(BlockQuantizer):
    """Sends a bit per element and two float32 means per block."""

    name = "onebit"
    use = "A bit per element: with error feedback and dense steps first, or as `comm_optimizer: onebit_adam`."

    block: Block = Field(default=256, description="consecutive elements that share two means")

    def wire_bytes(self, shape: Shape) -> int:
        """A bit per element and eight bytes per block."""
        return 8 * self.blocks(shape) + packed_bytes(numel(shape), 1)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Average both sides of zero; NaN is on the side that is not negative."""
        values = x.view(-1)
        negative = values < 0
        means = []
        for side in (~negative, negative):
            parts = (torch.where(side, values, 0.0), side)
            sums, counts = (self.in_blocks(part).sum(dim=1, dtype=torch.float64) for part in parts)
            means.append((sums / counts.clamp_min(1)).to(torch.float32))
        return torch.cat([torch.stack(means, dim=1).view(-1).view(torch.uint8), pack(negative, 1)])

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Replace each element by the mean of its side."""
        means, packed = wire.split([8 * self.blocks(shape), packed_bytes(numel(shape), 1)])
        pairs = as_numbers(means, torch.float32).view(-1, 2).repeat_interleave(self.block, dim=0)
        rest, negative = pairs[: numel(shape)].unbind(1)
        return torch.where(unpack(packed, 1, numel(shape)).to(torch.bool), negative, rest)
