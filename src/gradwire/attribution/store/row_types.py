"""Row types: how the store writes a row, and the bounds on its numbers that its bytes give.

``float32`` writes the numbers themselves. The other types write bytes: two float32 numbers, scale s and largest
magnitude m of the row, and then one code per entry. A code is the value v nearest to x · top / m, and x is read as
s · v. s is chosen for each row so that its norm is kept, because the χ² check and cosines depend on norms.

| type | values v | top | bytes per row of D numbers |
|:--|:--|:--|:--|
| float16 | float16 | 1 | 8 + 2D |
| int8 | -254, -252, …, 254 | 254 | 8 + D |
| int4 | -14, -12, …, 14 | 14 | 8 + ⌈D/2⌉ |
| onebit | -1, 1 | 1 | 8 + ⌈D/8⌉ |

QLESS (Ananta et al., 2025) selects training data from rows of 8, 4, 2 and 1 bits, each with a scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.comm.compressors.packing import pack, packed_bytes, unpack

HEADER = 8  # bytes: scale and largest magnitude, little-endian float32
HALF_ULP, SUBNORMAL = 2.0**-11, 2.0**-25  # of float16: rounding error, relative and at least


# Why: docs/decisions.md, "Row types keep norms and say their intervals".
class Bounds(NamedTuple):
    """Bounds on rows by their bytes, in float64: the interval of each entry, [n, D]; norms and largest
    magnitudes, [n].
    """

    low: Tensor
    high: Tensor
    norm: Tensor
    largest: Tensor


def least_deviation(left: Bounds, right: Bounds) -> Tensor:
    """Bound ``‖x - y‖ / max(‖x‖, ‖y‖)`` from below for rows x, y within these bounds: [n]; 0 for two zero rows.

    Exact for float32. A stored row is thus never farther from a recomputed one than the two computations were. Neither
    norms nor largest magnitudes of two rows differ by more than the norm of their difference.
    """
    gap = torch.maximum(left.low - right.high, right.low - left.high).clamp(min=0)
    numbers = torch.stack([gap.norm(dim=1), left.norm - right.norm, left.largest - right.largest])
    return numbers.abs().amax(dim=0) / _or_one(torch.maximum(left.norm, right.norm))


class RowCodec(ABC):
    """A row type for rows of one width.

    Args:
        dim: D, the numbers in a row.

    Attributes:
        name: The row type.
        dtype: Type of the stored matrix [n, width].
        width: Columns of the stored matrix.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]
    width: int

    def __init__(self, dim: int) -> None:
        self.dim = dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.width * self.dtype.itemsize

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Encode float32 rows [n, D] as a stored matrix; rows that are not finite decode as such."""

    @abstractmethod
    def decode(self, stored: Tensor) -> Tensor:
        """Decode a stored matrix to float32 rows [n, D]."""

    @abstractmethod
    def bounds(self, stored: Tensor) -> Bounds:
        """Bound the rows that have these encodings."""


class Float32(RowCodec):
    """The numbers themselves."""

    name, dtype = "float32", torch.float32

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.width = dim

    def encode(self, rows: Tensor) -> Tensor:
        """Return the rows."""
        return rows

    def decode(self, stored: Tensor) -> Tensor:
        """Return the rows."""
        return stored

    def bounds(self, stored: Tensor) -> Bounds:
        """Return the rows as both ends."""
        exact = stored.double()
        return Bounds(exact, exact, exact.norm(dim=1), exact.abs().amax(dim=1))


class Scaled(RowCodec):
    """Codes behind a scale for each row: the part that these types share.

    Attributes:
        top: The largest value of a code.
    """

    dtype = torch.uint8
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
        codes = self.codes(rows / _or_one(largest) * self.top)
        norm, of_values = (_norm(numbers) for numbers in (rows, self.values(codes)))
        scale = (norm / _or_one(of_values)).float()
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


CODECS: dict[str, type[RowCodec]] = {kind.name: kind for kind in (Float32, Float16, Int8, Int4, Onebit)}


def build(name: str, dim: int) -> RowCodec:
    """Return a row type's codec for rows of ``dim`` numbers."""
    return CODECS[name](dim)


def _numbers(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Read columns of bytes as numbers; they are copied, since a view needs aligned rows."""
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)


def _or_one(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, 1, divisor)
