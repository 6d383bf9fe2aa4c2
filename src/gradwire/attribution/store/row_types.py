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
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


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
    gap = (left.low - right.high).maximum(right.low - left.high).clamp(min=0).norm(dim=1)
    apart = gap.maximum((left.norm - right.norm).abs()).maximum((left.largest - right.largest).abs())
    return apart / or_one(left.norm.maximum(right.norm))


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
    dtype: ClassVar[np.dtype[Any]]
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

    name, dtype = "float32", np.dtype("<f4")

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


def or_one(divisor: Tensor) -> Tensor:
    """Replace zeros by ones."""
    return divisor.masked_fill(divisor == 0, 1)
