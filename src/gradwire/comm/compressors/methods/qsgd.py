"""Stochastic rounding to s levels of a bucket's norm (QSGD).

Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding"
(NeurIPS 2017), section 3. An element x of a bucket becomes ``norm * sgn(x) * l / s``, where the integer l is ``s |x| /
norm`` rounded down or up, up with the probability of its fractional part.

Wire, for n elements in row-major order and b = ceil(n / block) buckets: b norms as float32, then the n numbers ``sgn(x)
* l`` as two's complement of ceil(log2(2s + 1)) bits, packed (`gradwire.comm.compressors.packing`).

The 2-norm is summed in float64 and rounded once. It is the paper's definition and leaves most numbers 0 when s is below
the square root of the bucket's size. The maximum norm uses all s levels: at the same size it is more accurate (the
paper's own experiments use it). The paper's Elias code is left out.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import SMALLEST_SCALE, Block, BlockQuantizer, Shape, as_numbers, numel, quotient
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack


class QSGD(BlockQuantizer):
    """Sends an integer between -s and s per element and a float32 norm per bucket; unbiased.

    An element's variance is ``(norm / s)^2 f (1 - f)``, where f is the fractional part of ``s |x| / norm``. With the
    2-norm that sums to at most ``min(d / s^2, sqrt(d) / s) |x|^2`` over a bucket of d, and for s = 1 to exactly
    ``|x|_1 |x|_2 - |x|_2^2``.
    """

    name = "qsgd"
    use = "When an analysis asks for an unbiased estimate with a bound on its variance."

    levels: int = Field(default=127, ge=1, le=2**15 - 1, description="levels s between zero and the norm")
    norm: Literal["l2", "max"] = Field(
        default="l2", description="norm of a bucket: its 2-norm or its largest magnitude"
    )
    block: Block = Field(default=512, description="consecutive elements of a bucket, which share one norm")

    @property
    def unbiased(self) -> bool:
        """True for all options."""
        return True

    @property
    def overflow(self) -> float:  # type: ignore[override]
        """The magnitude from which the 2-norm may overflow float32."""
        return torch.finfo(torch.float32).max / math.sqrt(self.block) if self.norm == "l2" else math.inf

    @property
    def num_bits(self) -> int:
        """Bits of a number."""
        return (2 * self.levels).bit_length()

    def wire_bytes(self, shape: Shape) -> int:
        """Four bytes per bucket and `num_bits` per element."""
        return 4 * self.blocks(shape) + packed_bytes(numel(shape), self.num_bits)

    def norms(self, x: Tensor) -> Tensor:
        """Each bucket's norm: float32 [b]."""
        blocks = self.in_blocks(x.view(-1))
        if self.norm == "max":
            return blocks.abs().amax(dim=1)
        return blocks.to(torch.float64).square_().sum(dim=1).sqrt_().to(torch.float32)

    def steps(self, norms: Tensor) -> Tensor:
        """Size of each bucket's levels: float32 [b]."""
        return quotient(norms, self.levels).clamp_min_(SMALLEST_SCALE)

    def not_representable(self, x: Tensor) -> Tensor:
        """Whether a norm is not finite: bool []."""
        return self.norms(x).isfinite().all().logical_not_()

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Divide each bucket by its step and round down or up."""
        norms = self.norms(x)
        levels = self.divided(x, self.steps(norms))
        numbers = self.rounded(levels, self.levels, generator).to(torch.int16)
        fields = numbers.to(torch.int32) & (2**self.num_bits - 1)
        return torch.cat([norms.view(torch.uint8), pack(fields, self.num_bits)])

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply each number by its bucket's step."""
        head = 4 * self.blocks(shape)
        if wire.numel() < head:
            raise ValueError(
                f"invalid payload: {wire.numel()} bytes cannot encode {self.blocks(shape)} norms of {self.name}"
            )
        norms, rest = as_numbers(wire[:head], torch.float32), wire[head:]
        sign = 2 ** (self.num_bits - 1)
        numbers = (unpack(rest, self.num_bits, numel(shape)).to(torch.int32) ^ sign) - sign
        return self.multiplied(numbers, self.steps(norms))
