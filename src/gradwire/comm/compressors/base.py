"""The base of compressors: options as typed data, and a pair of functions between a tensor and its bytes.

A method implements `to_wire`, `from_wire` and `wire_bytes` in plain torch; that is its definition, and says with `use`
and `unbiased` what it is for. Everything else has a default here. `driver` has the calls that reductions make, `rounds`
the second form of methods that a native collective can sum.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from gradwire.base.flags import COUNT
from gradwire.comm.compressors.driver import Driver
from gradwire.comm.compressors.philox import draw_seed, uniforms
from gradwire.comm.compressors.rounds import Reducible
from gradwire.comm.compressors.segments import Shape as Shape
from gradwire.comm.compressors.segments import numel as numel

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # keeps the division exact for denormal blocks, and zeros at zero

Count = Annotated[int, Field(**COUNT.limits)]  # a type of options
Block = Annotated[int, Field(ge=1, le=2**24)]  # likewise, of elements: reference implementations fill up the last block


def as_numbers(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes (uint8, contiguous) as numbers of ``dtype``; copied only where they are not aligned in memory."""
    aligned = wire.storage_offset() % dtype.itemsize == 0
    return (wire if aligned else wire.clone()).view(dtype)


def quotient(x: Tensor, number: float) -> Tensor:
    """``x / number``, correctly rounded on every device: CUDA multiplies by the reciprocal of a Python number."""
    return x / x.new_full((), number)


class Compressor(Driver, Reducible, ABC):
    """Base of all compressors: frozen, and its fields are the method's options.

    An encoding is self-contained: who has the bytes and the shape can decode it. The wire is little-endian.

    Raises:
        BadInput: If an option is unknown, or has a value that it does not take.
    """

    name: ClassVar[str]
    use: ClassVar[str] = ""
    """When to take it, in a sentence."""
    overflow: ClassVar[float] = math.inf
    """The smallest magnitude that the wire can no longer carry as a finite number."""
    linear: ClassVar[bool] = False
    """Whether `rounds` equals compressing the mean; ``algorithm: auto`` then uses it."""

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of ``decode(encode(x))`` is ``x``; declared here, checked by the tests."""
        return False

    @abstractmethod
    def wire_bytes(self, shape: Shape) -> int | None:
        """Exact size of an encoding in bytes; None only where it depends on the data."""

    @abstractmethod
    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode ``x``, a contiguous float32 vector or matrix: uint8 [b], contiguous, on the same device."""

    @abstractmethod
    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Decode to float32 with as many elements as ``shape`` has."""

    def compresses(self, shape: Shape) -> bool:
        """Whether the method encodes a tensor of that shape; if not, it is sent as float32, which is not larger."""
        return True

    def index_bytes(self, wire: Tensor, shape: Shape) -> int:
        """Bytes of ``wire`` that encode the places of the sent values; 0 for a method that sends every place."""
        return 0

    def sent_elements(self, shape: Shape, wire: Tensor | None = None) -> int | None:
        """How many elements of a tensor of ``shape`` are sent; None for a method that does not choose among them.

        ``wire`` is an encoding, which is looked into only where the number depends on the data.
        """
        return None


class Quantizer(Compressor):
    """A compressor that keeps every element and makes each one shorter: what a chain may put after a sparsifier."""


class BlockQuantizer(Quantizer):
    """A quantizer whose elements share numbers, such as a scale, in blocks of ``block`` consecutive ones."""

    if TYPE_CHECKING:  # a method declares it among its options, in their order and with its default
        block: Block

    def blocks(self, shape: Shape) -> int:
        """Number of blocks, the last one perhaps shorter."""
        return -(-numel(shape) // self.block)

    def in_blocks(self, values: Tensor) -> Tensor:
        """A vector as the rows of a matrix, one row per block, zeros at the end."""
        return pad(values, (0, -values.numel() % self.block)).view(-1, self.block)

    def scales(self, x: Tensor, top: float) -> Tensor:
        """Each block's scale, with which its largest magnitude becomes ``top``: float32 [b], normal numbers."""
        return quotient(self.in_blocks(x.view(-1)).abs().amax(dim=1), top).clamp_min_(SMALLEST_SCALE)

    def rounded(self, levels: Tensor, top: int, generator: torch.Generator | None) -> Tensor:
        """Levels as integers up to ``top``, rounded up with the probability of the fractional part, else down."""
        low = levels.floor()  # the larger magnitude for negative values, whose probability is lower accordingly
        up = uniforms(draw_seed(generator, levels.device, self.name), levels.numel()) < levels - low
        return (low + up).clamp_(-top, top)

    def divided(self, x: Tensor, steps: Tensor) -> Tensor:
        """Each element by its block's step: float32 [n]."""
        return (self.in_blocks(x.view(-1)) / steps.unsqueeze(1)).view(-1)[: x.numel()]

    def multiplied(self, codes: Tensor, steps: Tensor) -> Tensor:
        """Each code times its block's step: float32 [n]."""
        return self.in_blocks(codes.to(torch.float32)).mul_(steps.unsqueeze(1)).view(-1)[: codes.numel()]
