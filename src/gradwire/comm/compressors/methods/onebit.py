"""1-bit SGD: a bit per element and two means per group, one of the negative elements and one of the rest.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs" (Interspeech 2014), with a group per column of a matrix as there, or per block of consecutive elements. The paper
relies on error feedback (`gradwire.comm.compressors.feedback`).

Wire, for n elements in row-major order and g groups: g pairs of float32, the mean of the elements that are not negative
and the mean of those that are (0 where a side is empty); then n bits, 1 where ``x < 0``, packed
(`gradwire.comm.compressors.packing`).

Means are sums in float64, divided there and rounded once to float32. Within a group the decoded values C are the
orthogonal projection of x onto the values that these bits can represent: C has x's sum, and
``||x - C||^2 = ||x||^2 - ||C||^2``.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Block, BlockQuantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack


class OneBit(BlockQuantizer):
    """Sends a bit per element and two float32 means per block or column."""

    name = "onebit"
    use = "A bit per element: with error feedback and dense steps first, or as `comm_optimizer: onebit_adam`."

    means: Literal["block", "column"] = Field(
        default="block",
        description="what shares two means: consecutive elements, or a matrix column (a vector is one)",
    )
    block: Block = Field(default=256, description="consecutive elements of a block")

    def groups(self, shape: Shape) -> int:
        """Number of blocks, the last one perhaps shorter, or of columns."""
        return columns(shape) if self.means == "column" else self.blocks(shape)

    def wire_bytes(self, shape: Shape) -> int:
        """A bit per element and eight bytes per group."""
        return 8 * self.groups(shape) + packed_bytes(numel(shape), 1)

    def per_group(self, values: Tensor, shape: Shape) -> Tensor:
        """Sums of a value per element over each group: float64 [groups]."""
        if self.means == "column":
            return values.view(-1, columns(shape)).sum(dim=0, dtype=torch.float64)
        return self.in_blocks(values).sum(dim=1, dtype=torch.float64)

    def per_element(self, values: Tensor, shape: Shape) -> Tensor:
        """Each group's value at each of its elements: [n]."""
        if self.means == "column":
            return values.repeat(numel(shape) // columns(shape))
        return values.repeat_interleave(self.block)[: numel(shape)]

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Average both sides of zero; NaN is on the side that is not negative."""
        values = x.view(-1)
        negative = values < 0
        means = []
        for side in (~negative, negative):
            sums, counts = (self.per_group(part, x.shape) for part in (torch.where(side, values, 0.0), side))
            means.append((sums / counts.clamp_min(1)).to(torch.float32))
        return torch.cat([torch.stack(means, dim=1).view(-1).view(torch.uint8), pack(negative, 1)])

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Replace each element by the mean of its side."""
        means, packed = wire.split([8 * self.groups(shape), packed_bytes(numel(shape), 1)])
        rest, negative = (
            self.per_element(side, shape) for side in as_numbers(means, torch.float32).view(-1, 2).unbind(1)
        )
        return torch.where(unpack(packed, 1, numel(shape)).to(torch.bool), negative, rest)


def columns(shape: Shape) -> int:
    """Number of columns; a vector or an empty tensor counts as one."""
    return shape[-1] if isinstance(shape, tuple) and len(shape) > 1 and numel(shape) else 1
