"""signSGD: a bit per element, plain or scaled by the block's mean magnitude, with a majority vote.

Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (ICML 2018), whose signs and majority vote
are ``scale: none``; scaled as in Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes" (ICML 2019), a block at a time. A sign is -1 where ``x < 0``, else +1, also at 0.

Wire, for n elements in row-major order and b = ceil(n / block) blocks: b scales as float32, each the mean of |x| over
its block (a float64 sum, divided there and rounded once); or, without scales, one byte, which is 0, or 1 where x is not
finite; then everything decodes to NaN, because signs cannot represent it. Then n bits, 1 where ``x < 0``, packed
(`gradwire.comm.compressors.packing`). A scaled block of d elements has the squared error
``||x||^2 - ||x||_1^2 / d``.

Rounds, without scales only: the wires are gathered, and each element of the mean is the sign of the sum of the ranks'
signs: -1, +1, or 0 for a tie, which an even number of ranks can have. This result has no scale.
A rank contributes its own signs; error feedback subtracts these, which makes sense only for gradients of magnitude 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Block, BlockQuantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State


class SignSGD(BlockQuantizer):
    """Sends the sign of each element, and a float32 scale per block unless ``scale`` is ``none``."""

    name = "signsgd"
    use = "A bit per element for SGD with error feedback; under Adam it cost much perplexity."

    scale: Literal["mean", "none"] = Field(
        default="mean", description="magnitude of a sign: the block's mean |x|, or 1 (then ranks can vote)"
    )
    block: Block = Field(default=256, description="consecutive elements that share one scale")

    @property
    def has_rounds(self) -> bool:
        """Plain signs can be voted on."""
        return self.scale == "none"

    def head_bytes(self, shape: Shape) -> int:
        """Four bytes per block, the last one perhaps shorter; one byte without scales."""
        return 4 * self.blocks(shape) if self.scale == "mean" else 1

    def wire_bytes(self, shape: Shape) -> int:
        """The head and a bit per element."""
        return self.head_bytes(shape) + packed_bytes(numel(shape), 1)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """The scales, or whether x is not finite; and the signs."""
        values = x.view(-1)
        head = (
            self.mean_magnitudes(values).view(torch.uint8)
            if self.scale == "mean"
            else self.not_representable(x).view(1).to(torch.uint8)
        )
        return torch.cat([head, pack(values < 0, 1)])

    def mean_magnitudes(self, values: Tensor) -> Tensor:
        """Mean magnitude of each block: float32 [blocks]."""
        starts = torch.arange(0, values.numel(), self.block, dtype=torch.int64, device=values.device)
        counts = (values.numel() - starts).clamp_max(self.block)
        blocks = self.in_blocks(values.abs())
        return (blocks.sum(dim=1, dtype=torch.float64) / counts).to(torch.float32)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Each sign times its block's scale."""
        head, packed = wire.split([self.head_bytes(shape), packed_bytes(numel(shape), 1)])
        signs = 1.0 - 2.0 * unpack(packed, 1, numel(shape))
        scales, block = self.magnitudes(head, shape)
        return scales.repeat_interleave(block)[: signs.numel()] * signs

    def magnitudes(self, head: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """Scales (float32 [b]) and the number of elements per scale; without scales, one for all: 1 or NaN."""
        if self.scale == "mean":
            return as_numbers(head, torch.float32), self.block
        return unspoiled(head == 0), max(1, numel(shape))

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """The majority's sign of each element."""
        wire = self.coded(x, None)[0]
        ballots = yield ReduceRequest("gather", wire)
        bits = ballots[:, self.head_bytes(context.shape) :]
        lanes = [((bits >> lane) & 1).sum(dim=0, dtype=torch.int32) for lane in range(8)]
        against = torch.stack(lanes, dim=1).view(-1)[: x.numel()]
        mean = (context.world - 2 * against).sign() * unspoiled((ballots[:, 0] == 0).all())
        return mean.view(context.shape), self.decoded(wire, context.shape).view(context.shape)

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """The wire."""
        return RoundCost(gathered=self.wire_bytes(shape))


def unspoiled(finite: Tensor) -> Tensor:
    """1 where a flag is set, else NaN: float32."""
    return torch.ones_like(finite, dtype=torch.float32).masked_fill_(~finite, torch.nan)
