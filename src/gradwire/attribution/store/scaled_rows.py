"""Row types of fewer bytes than float32: codes behind a scale for each row (`row_types`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.attribution.store.row_types import Bounds, RowCodec, or_one
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack

HEADER = 8  # bytes: scale and largest magnitude, little-endian float32
HALF_ULP, SUBNORMAL = 2.0**-11, 2.0**-25  # of float16: rounding error, relative and at least


class Scaled(RowCodec):
    """Codes behind a scale for each row: the part that these types share.

    Attributes:
        top: The largest value of a code.
    """

    dtype = np.dtype("u1")
    top: ClassVar[int]

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.width = HEADER + self.code_bytes

    @property
    @abstractmethod
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""

    @abstractmethod
    def codes(self, values: Tensor) -> Tensor:
        """Round numbers in [-top, top], float32 [n, D], to uint8 [n, code_bytes]."""

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """Return the values of codes, float32 [n, D]."""

    @abstractmethod
    def radius(self, values: Tensor) -> Tensor | float:
        """Return how far from a value the numbers are that round to it."""

    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows, each with its own scale."""
        largest = rows.abs().amax(dim=1, keepdim=True)
        codes = self.codes(rows / or_one(largest) * self.top)
        norm, of_values = (_norm(numbers) for numbers in (rows, self.values(codes)))
        scale = (norm / or_one(of_values)).float()
        return torch.cat([torch.cat([scale, largest], dim=1).view(torch.uint8), codes], dim=1)

    def decode(self, stored: Tensor) -> Tensor:
        """Decode rows."""
        scale, _, values = self._parts(stored)
        return values.mul_(scale)

    def bounds(self, stored: Tensor) -> Bounds:
        """Bound rows by the numbers that round to their codes, and by the norms that their scales keep."""
        scale, largest, values = self._parts(stored)
        norm = (scale.double() * _norm(values)).squeeze(1)
        values, unit = values.double(), largest.double() / self.top
        radius = self.radius(values)
        low, high = ((values + end).clamp(-self.top, self.top) * unit for end in (-radius, radius))
        return Bounds(low, high, norm, largest.double().squeeze(1))

    def _parts(self, stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a stored matrix into scales [n, 1], largest magnitudes [n, 1] and values [n, D]."""
        header = _numbers(stored[:, :HEADER], torch.float32)
        return header[:, :1], header[:, 1:], self.values(stored[:, HEADER:])


class Float16(Scaled):
    """Half precision."""

    name, top = "float16", 1

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return 2 * self.dim

    def codes(self, values: Tensor) -> Tensor:
        """Round to float16."""
        return values.half().contiguous().view(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """Return float16 numbers."""
        return _numbers(codes, torch.float16).float()

    def radius(self, values: Tensor) -> Tensor:
        """Return the rounding error."""
        return (values.abs() * HALF_ULP).clamp(min=SUBNORMAL)


class Grid(Scaled):
    """Evenly spaced values -top, -top + 2, …, top, numbered from 0; zero is one of them if there is a middle.

    Attributes:
        bits: Bits of a code.
    """

    bits: ClassVar[int]

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return packed_bytes(self.dim, self.bits)

    def codes(self, values: Tensor) -> Tensor:
        """Round to the numbers of the nearest values, and pack them."""
        border = 0.0 if self.top % 2 else 0.5  # two values meet at zero, or the middle one ends at 1; exact near zero
        numbers = ((values / 2 + border).floor() + (self.top + 1) // 2).clamp(0, self.top).to(torch.uint8)
        lanes = 8 // self.bits
        return pack(pad(numbers, (0, -self.dim % lanes)).flatten(), self.bits).view(-1, self.code_bytes)

    def values(self, codes: Tensor) -> Tensor:
        """Unpack the numbers, and return their values."""
        lanes = 8 // self.bits
        numbers = unpack(codes.flatten(), self.bits, lanes * codes.numel()).view(len(codes), -1)[:, : self.dim]
        return numbers.float().mul_(2).sub_(self.top)

    def radius(self, values: Tensor) -> float:
        """Return half of the spacing."""
        return 1.0


class Int8(Grid):
    """255 values."""

    name, bits, top = "int8", 8, 254


class Int4(Grid):
    """15 values."""

    name, bits, top = "int4", 4, 14


class Onebit(Grid):
    """Two values: the signs."""

    name, bits, top = "onebit", 1, 1


SCALED: dict[str, type[Scaled]] = {kind.name: kind for kind in (Float16, Int8, Int4, Onebit)}


def _numbers(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Read columns of bytes as numbers; they are copied, since a view needs aligned rows."""
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
